"""Saving with several processes: all ranks save at the same safe point; rank 0 writes, the others follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from buoy.checkpoint.encoding import AsTensor
from buoy.checkpoint.retention import BestMetric, Keep
from buoy.checkpoint.saver import Receipt
from buoy.checkpoint.store import Checkpoint, Store
from buoy.flight import recorder
from buoy.training.messages import say_nothing
from buoy.training.resume import OURS
from buoy.training.save_policy import ENDING, REASONS
from buoy.training.signals import Signals
from buoy.units import format_duration

if TYPE_CHECKING:
    from buoy.training.manager import CheckpointManager

_PATIENCE = 120.0
"""Seconds without a safe point after which that is said."""
_SELDOM = 3600.0


class Saves:
    """The saves of one run, for all of its ranks."""

    def __init__(
        self,
        manager: CheckpointManager | Follower,
        keep: Keep | int | None,
        say: Callable[[str], None],
        step: int | None = None,
    ) -> None:
        """`step`: what the run resumes from."""
        from buoy.torch.step import ranks as distributed

        self._ranks = distributed
        self.is_alone = distributed.world()[1] == 1
        """No other process trains with this one."""
        self._manager = manager
        self._best = keep.metric[0] if isinstance(keep, Keep) and keep.best else None
        self.best_metric = BestMetric(keep, say)
        self._say = say
        self._wish: tuple[str, str | None] | None = None
        self._metrics: dict[str, float] = {}
        self._waiting_since: float | None = None
        self._outside_since: float | None = None
        self._said_trouble = self._said_outside = False
        self.step = step
        """The step that was last saved."""
        self.finished_step: int | None = None
        """The same, if this process saved it as the end of the run."""
        self.was_stopped = False
        """The last save was one that a signal asked for."""

    def wish(self, reason: str, pin: str | None = None) -> None:
        """Save at the next safe point."""
        self._wish = (reason, pin)

    def measured(self, values: Mapping[str, float], *, in_batch: bool = False) -> None:
        """Figures of the weights as they are now; the one that retention goes by asks for a save."""
        self._metrics.update(values)
        self.best_metric.came(values, in_batch=in_batch)
        if self._best in values and self._wish is None:
            self.wish("epoch")

    def weights_change(self) -> None:
        """What was measured so far was measured on other weights."""
        self._metrics.clear()

    def due(self, step: int, otherwise: str = "") -> tuple[str, str | None]:
        """At a safe point, on every rank: the reason to save now, or an empty one; and the name to pin it under."""
        self._outside_since = None
        wish, pin = self._wish or (otherwise, None)
        reason = self._manager.due(step) or wish
        if not self.is_alone:
            reason = REASONS[self._ranks.agree(REASONS.index(reason))]
        return reason, pin

    @property
    def is_stopping(self) -> bool:
        """A signal has asked this process to end."""
        return self._manager.is_stopping

    def postpone(self, step: int) -> None:
        """Something of a step is under way; a save that is due for long is reported."""
        if not self.is_alone or not (self._wish or self._manager.due(step)):
            return
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > _PATIENCE:
            self._say(
                f"a checkpoint has been due for {format_duration(now - self._waiting_since)}, but no tracked optimizer "
                "stepped between two batches; check that you track the optimizer that steps"
            )
            self._waiting_since = now + _SELDOM

    def stepped_outside(self) -> None:
        """A step where nothing is saved by itself; that is reported, once, if nothing else comes for long."""
        now = time.monotonic()
        if self._outside_since is None:
            self._outside_since = now
        elif now - self._outside_since > _PATIENCE and not self._said_outside:
            self._said_outside = True
            self._say(
                f"nothing was saved for {format_duration(now - self._outside_since)}: these steps are "
                "outside every loop over `run.batches`, and there a run saves by itself only when an "
                "epoch of `run.epochs` ends; hint: `for batch in run.batches(loader):`, or "
                "`run.save()` after a step"
            )

    def save(self, tracked: Mapping[str, Any], mine: dict[str, Any], **about: Any) -> Receipt | None:
        """Make a checkpoint of what is tracked and of every rank's own part; None when it failed, which is reported."""
        from buoy.torch.state.tensors import as_tensor

        __tracebackhide__ = True
        if not self.is_alone and not self._ranks.is_up():
            if self.step != about["step"]:
                self._trouble(
                    f"step {about['step']} was not saved: the process group is gone; call `run.save()` before "
                    "`destroy_process_group()`, or put the loop into `with buoy.Run(...) as run:`"
                )
            return None
        ranks = self._ranks.gather(mine)  # first: what may fail below must not leave a rank waiting
        self._wish = self._waiting_since = self._outside_since = None
        self.step, self.finished_step = about["step"], about["step"] if about["finished"] else None
        self.was_stopped = about["reason"] in ENDING
        receipt: Receipt | None = None
        try:
            items = {name: thing.state() for name, thing in tracked.items()}
            items[OURS] = {"ranks": ranks}
            receipt = self._manager.save(items, metrics=self._metrics, as_tensor=as_tensor, **about)
        except Exception as error:  # noqa: BLE001 - a state that cannot be saved any more must not end the training
            self._trouble(f"step {about['step']} was not saved; training continues: {error}")
        if about["reason"] in ENDING:
            self._ranks.agree(0)  # nobody goes before rank 0 has written
            self._manager.stop_if_asked()
            if not self.is_alone:
                raise SystemExit(128 + 15)  # another rank was asked to stop
        return receipt

    def _trouble(self, text: str) -> None:
        self._manager.recorder.event("trouble", what=text)
        if not self._said_trouble:
            self._said_trouble = True
            self._say(text)


class Follower:
    """Rank 1 and above. Same methods as `CheckpointManager`; `save` saves nothing."""

    def __init__(self, folder: str) -> None:
        self.recorder = recorder.current() or recorder.join(recorder.attempt_of_environment())
        self._store = Store(folder)
        self._signals = Signals(self.recorder, say_nothing)

    def newest(self) -> Checkpoint | None:
        """The checkpoint that rank 0 has found."""
        return self._store.newest(say_nothing)

    def expect(self, items: Mapping[str, object], as_tensor: AsTensor) -> None:
        """Nothing is written here."""

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around the iteration over batches: signals wait for the safe point that all ranks share."""
        self._signals.arm()
        try:
            yield
        finally:
            self._signals.disarm()

    def epoch_begins(self, epoch: int, of: int | None, step: int, *, is_whole: bool = True) -> None:
        """Rank 0 tells how long the training will be."""
        self.recorder.epoch(epoch)

    @property
    def is_stopping(self) -> bool:
        """A signal has asked this process to end."""
        return self._signals.asked is not None

    def due(self, step: int) -> str | None:
        """Only a signal can make a rank that does not write ask for a save."""
        return self._signals.asked

    def save(self, items: Mapping[str, object], *, step: int, **about: object) -> Receipt:
        """Rank 0 writes."""
        return Receipt(step, "", 0, 0.0, 0.0)

    def claim_step(self, step: int) -> None:
        """Rank 0 says whose the steps are."""

    def stop_if_asked(self) -> None:
        """After the save that a signal asked for: end as that signal would have ended it."""
        self._signals.answer()

    def finish(self) -> None:
        """Restore the signal handlers."""
        self._signals.let_go()
