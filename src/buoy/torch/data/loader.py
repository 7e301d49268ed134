"""A user's loader, opened at any place of any pass, in another process too.

Each kind of loader has its `Pass` (`replay`): a `DataLoader` over a map-style dataset is found by index, a loader or
stream with a state of its own by that, a list by index, and of anything else what was already seen is read again.

`Feeds` opens them for a loop of ours; `ResumableLoader` stands for the loader in a loop that is not ours (a Trainer's).
`batch_of` is a batch as a loader would make it, without taking one from it.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from buoy._compat.datasets import for_one_pass, loses_its_buffer
from buoy._compat.torch import forget_workers, has_usual_passes
from buoy.errors import UsageError
from buoy.flight.last_words import leave_out_ours
from buoy.torch.data import rng
from buoy.torch.data.order import DataMemory, Order
from buoy.torch.data.replay import (
    IndexPass,
    Pass,
    Place,
    PreparedPass,
    ReplayPass,
    Say,
    SequencePass,
    StatefulPass,
    changed,
    extent_of,
    has_state,
    is_prepared,
    length_of,
    within,
)
from buoy.torch.data.rng import Stream, initial_seed
from buoy.torch.data.workers import SeededDataset, WorkerStart, draw_in_every_pass

__all__ = ["Feeds", "Pass", "Place", "ResumableLoader", "batch_of", "is_loader", "is_source"]


class Feeds:
    """Opens passes; keeps what must live as long as the user's loader does (persistent workers)."""

    def __init__(self, say: Say, *, is_saved: bool = False) -> None:
        """`is_saved`: the training answers signals with a checkpoint, for which it may need more batches."""
        draw_in_every_pass()
        self._say, self._is_saved = say, is_saved
        # By the user's loader and no longer than it lives: some scripts build one for each epoch.
        self._twins: weakref.WeakKeyDictionary[Any, tuple[DataLoader[Any], Order]] = (
            weakref.WeakKeyDictionary()
        )
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()
        # By the id of what is iterated over, where that lives: scripts build a new loader around the same dataset.
        self._memories: dict[int, tuple[weakref.ref[Any], DataMemory]] = {}

    def open(self, loader: Any, place: Place, state: dict[str, Any] | None) -> Pass:
        """A pass over the loader, from its beginning or from where `state` was taken."""
        extent = extent_of(loader)
        if state and (told := changed(state.get("extent"), extent)) is not None:
            self._say(told)
            state = {**state, "last": None}  # there is nothing more to tell
        if is_prepared(loader):
            loader.set_epoch(
                place.epoch
            )  # it tells its sampler by a count that a resumed process begins at 0
        opened = self._open(within(loader), place, state)
        opened.extent = extent
        return PreparedPass(loader, opened) if is_prepared(loader) else opened

    def reopen(self, loader: Any, place: Place, lost: Pass) -> Pass | None:
        """The same pass from where it is, with new workers; None: it has none."""
        if not is_loader(loader) or not loader.num_workers:
            return None
        state, inner = lost.state_dict(), within(loader)
        for each in (inner, *self._twins.get(inner, ())[:1]):
            forget_workers(each)  # persistent ones, and they are gone
        return self.open(loader, place, state)

    def between_passes(self, loader: Any) -> dict[str, Any] | None:
        """What a loader's sampler or stream keeps from pass to pass; None: nothing, or it is not known."""
        memory = self._memory(loader)
        return memory.between_passes() if memory is not None else None

    def restore_between_passes(self, loader: Any, state: dict[str, Any], tracked: Collection[int]) -> None:
        """Give it back, in another process; except to those objects (by id) that the run restores by itself."""
        memory = self._memory(loader)
        if memory is not None:
            memory.restore_between_passes(state, tracked)

    def _memory(self, loader: Any) -> DataMemory | None:
        """Of what is iterated over in this process; what workers keep, they keep for themselves."""
        loader = within(loader)
        if _is_by_index(loader):
            return self._twin(loader)[1].memory
        if is_loader(loader):
            if loader.num_workers or not isinstance(loader.dataset, IterableDataset):
                return None
            stream, beside = loader.dataset, [loader.collate_fn]
        elif isinstance(loader, (Iterator, Sequence, Tensor)):
            return None
        else:
            stream, beside = loader, []
        known = self._memories.get(id(stream))
        if known is not None and known[0]() is stream:
            return known[1]
        try:
            memory = DataMemory.of_stream(stream, *beside)
            self._memories[id(stream)] = (weakref.ref(stream), memory)
        except TypeError:  # it cannot be known again
            return None
        return memory

    def _open(self, loader: Any, place: Place, state: dict[str, Any] | None) -> Pass:
        if _is_by_index(loader):
            return IndexPass(
                *self._twin(loader), place, state, self._say, partial(self._warn_of_generator, loader)
            )
        if _can_say_where_it_is(loader):
            return StatefulPass(for_one_pass(loader), place, state, self._memory(loader))
        if isinstance(loader, Sequence):
            return SequencePass(loader, state, self._say)
        stream, memory = Stream(place.number("stream")), self._memory(loader)
        if is_loader(loader) and isinstance(loader.dataset, IterableDataset):
            self._warn_of_staying_workers(loader)
            loader = _without_generator(loader)
        return ReplayPass(loader, stream, state, self._say, memory)

    def _warn_of_generator(self, loader: DataLoader[Any]) -> None:
        if loader not in self._warned:
            self._warned.add(loader)
            self._say(
                "a resume from the middle of this epoch will not be bit for bit: the loop draws from the generator "
                "of the loader or its sampler; hint: give each a generator of its own"
            )

    def _warn_of_staying_workers(self, loader: DataLoader[Any]) -> None:
        if loader.persistent_workers and loader not in self._warned:
            self._warned.add(loader)
            self._say(
                "a resume will not be bit for bit where the workers of this loader draw random numbers: they stay "
                "from one pass to the next, and cannot be seeded for each; hint: persistent_workers=False"
            )

    def _twin(self, loader: DataLoader[Any]) -> tuple[DataLoader[Any], Order]:
        """The user's loader over the wrapped dataset and order: every other property and override is kept."""
        known = self._twins.get(loader)
        if known is not None:
            return known
        twin, order = copy.copy(loader), Order(loader)
        replaced = {
            "dataset": SeededDataset(loader.dataset, loader.collate_fn),
            "batch_sampler" if loader.batch_sampler is not None else "sampler": order,
            "worker_init_fn": WorkerStart(loader.worker_init_fn, is_saved=self._is_saved),
        }
        for name, value in replaced.items():
            object.__setattr__(twin, name, value)  # a DataLoader refuses this, to protect one that is in use
        forget_workers(twin)
        if not getattr(twin, "in_order", True):
            self._say("in_order=False is ignored: buoy cannot resume batches that come in any order")
            object.__setattr__(twin, "in_order", True)
        self._twins[loader] = (twin, order)
        return twin, order


def is_loader(value: object) -> bool:
    """Whether this is a DataLoader, whose place is kept by `batches`."""
    return isinstance(value, DataLoader)


def _without_generator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Its generator only seeds workers, and is not what it was after a death; the training may draw from it too."""
    if loader.generator is None or not _iterates_plainly(loader):
        return loader
    loader = copy.copy(loader)
    loader.generator = None
    return loader


def _is_by_index(loader: Any) -> bool:
    """A DataLoader that asks its sampler for indices, and whose dataset does not keep a state of its own."""
    if not is_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    if _is_torchdatas(loader):
        return not hasattr(loader.dataset, "state_dict")
    return _iterates_plainly(loader)


def _can_say_where_it_is(loader: Any) -> bool:
    if not has_state(loader) or loses_its_buffer(getattr(loader, "dataset", loader)):
        return False
    return not is_loader(loader) or _is_torchdatas(loader)


def _iterates_plainly(loader: DataLoader[Any]) -> bool:
    kind = type(loader)  # one that iterates in a way of its own (accelerate's) may not come by our order
    return kind.__iter__ is DataLoader.__iter__ and has_usual_passes(loader)


def _is_torchdatas(loader: Any) -> bool:
    return type(loader).__module__.startswith("torchdata.stateful_dataloader")


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
        self._looks_ahead = not hasattr(owner.loader, "__len__") or length_of(owner.loader) is None

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


is_source = is_loader
"""Whether batches come from this."""


def batch_of(loader: Any, name: str = "loader") -> Any:
    """The first samples of the data set as one batch: no iterator, no worker, and no random number is used up.

    >>> batch_of(DataLoader([1, 2, 3], batch_size=2))
    tensor([1, 2])
    """
    data, size = loader.dataset, loader.batch_size
    if isinstance(data, IterableDataset) or size is None or not hasattr(data, "__len__"):
        raise UsageError(
            f"a batch cannot be made without taking one from `{name}`",
            received="a loader with an iterable data set or a batch sampler of its own",
            expected="a sample batch",
            hint=f"`batch = next(iter({name}))`, then `%buoy plan` again",
        )
    places = list(range(min(size, len(data))))
    before = rng.capture()
    try:
        many = getattr(data, "__getitems__", None)
        return loader.collate_fn(many(places) if many is not None else [data[place] for place in places])
    finally:
        rng.restore(before)
