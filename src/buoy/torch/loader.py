"""A user's loader for a loop that is not ours (a Trainer's): the same batches after a death, from the same place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from buoy.flight.last_words import leave_out_ours
from buoy.torch.data import Feeds, Pass, Place, Say
from buoy.torch.rng import initial_seed


class ResumableLoader:
    """Looks like the loader it is built on; its order and its augmentation depend on (seed, epoch, place) only.

    >>> loader = ResumableLoader([10, 20, 30], print, seed=1, saved={"batches": 1})
    >>> list(loader), len(loader)
    ([20, 30], 3)
    """

    def __init__(
        self,
        loader: Any,
        say: Say,
        *,
        seed: int | None = None,
        saved: dict[str, Any] | None = None,
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        """`is_stopping`: a signal has asked the training to end, and may have ended the workers before it."""
        self.loader = loader
        """The user's own."""
        self.epoch = 0
        """Of the next pass."""
        self.seed = initial_seed() if seed is None else seed
        self.is_stopping = is_stopping
        self._feeds = Feeds(say, is_saved=True)
        self._saved = saved
        self._walk: _Walk | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> _Walk:
        self._walk = _Walk(self, self._feeds, Place(self.seed, 0, self.epoch, 0), self._saved)
        return self._walk

    def set_epoch(self, epoch: int) -> None:
        """Trainers tell it before each pass; samplers of the user's hear of it too."""
        self.epoch = epoch
        owners: list[Any] = [getattr(self.loader, name, None) for name in ("sampler", "batch_sampler")]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def arrived(self) -> None:
        """The place that was saved is reached: later passes begin at their beginning."""
        self._saved = None

    @property
    def batches(self) -> int:
        """How many were handed out in this pass."""
        return self._walk.batches if self._walk is not None else 0

    def place(self, batches: int) -> dict[str, Any] | None:
        """Where the pass was when so many of its batches had been trained; None: at its beginning."""
        return self._walk.place(batches) if self._walk is not None else self._saved


class _Walk:
    """One pass, opened when its first batch is asked for: a trainer may begin one and drop it again."""

    def __init__(
        self, owner: ResumableLoader, feeds: Feeds, place: Place, saved: dict[str, Any] | None
    ) -> None:
        self._owner, self._feeds, self._place, self._saved = owner, feeds, place, saved
        self._pass: Pass | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=3)
        # Where the end cannot be known, trainers read a batch ahead of the one that is trained.
        self._looks_ahead = not hasattr(owner.loader, "__len__") or _length(owner.loader) is None

    def __iter__(self) -> _Walk:
        return self

    def __next__(self) -> Any:
        try:
            return self._next()
        except BaseException as error:
            leave_out_ours(error)
            raise

    def _next(self) -> Any:
        if self._pass is None:
            self._pass = self._feeds.open(self._owner.loader, self._place, self._saved)
        if self._looks_ahead:
            self._recent.append(self._pass.state_dict())
        try:
            return next(self._pass)
        except StopIteration:
            raise
        except Exception:
            if not self._owner.is_stopping():
                raise
            again = self._feeds.reopen(self._owner.loader, self._place, self._pass)
            if again is None:
                raise
            self._pass = again
        return next(again)

    @property
    def batches(self) -> int:
        if self._pass is None:
            return int(self._saved["batches"]) if self._saved else 0
        return self._pass.batches

    def place(self, batches: int) -> dict[str, Any] | None:
        if self._pass is None:
            return self._saved
        if self._pass.batches == batches:
            return self._pass.state_dict()
        for state in self._recent:
            if state["batches"] == batches:
                return state
        return None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
