"""The checkpoints of one run while it trains: made when `save_policy` says so, kept as `retention` says.

`buoy.Run` (PyTorch) and every Guard hold one each; it knows no framework. They ask `due` between two steps, hand over
what is to be saved, and let `stop_if_asked` end the process when a signal wanted that. What fails here is reported and
survived; only what the user must fix before training begins is raised.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from math import inf, isfinite
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from buoy.checkpoint.encoding import AsTensor
from buoy.checkpoint.retention import PASSING, DiskBudget
from buoy.checkpoint.saver import Receipt, Saver
from buoy.checkpoint.store import Checkpoint, Store, WriterBusy, newest_good
from buoy.errors import BuoyError, UsageError
from buoy.machine import process
from buoy.training.messages import say
from buoy.training.options import Options
from buoy.training.recording import Length, record, refused
from buoy.training.save_policy import ENDING, SavePolicy
from buoy.training.signals import Signals
from buoy.units import format_bytes, format_duration

if TYPE_CHECKING:
    from buoy.checkpoint.mirror.mirror import Mirror

_NAG_SECONDS = 900.0
"""A trouble that lasts is said again this rarely."""
_GRACE_SECONDS = 10.0
"""Who has sent a signal will not wait much longer for a writer that hangs."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointManager:
    """Makes and keeps one run's checkpoints; one per process and run folder."""

    def __init__(self, folder: str, options: Options | None = None) -> None:
        options = options or Options()
        mirror = options.mirror
        if process.is_rehearsal():
            folder, mirror = process.scratch_folder(), None
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._mirror: Mirror | None = None
        if mirror is not None:
            from buoy.checkpoint.mirror.mirror import Mirror

            self._mirror = Mirror(self.folder, mirror, options.kept)
        self.store = Store(self.folder)
        # Of a run that is there already the lock comes first: who is refused leaves no attempt behind.
        try:
            saver = self.store.saver(say, self._event) if os.path.isdir(self.store.checkpoints) else None
        except WriterBusy:
            refused(self.folder)
            raise
        log_folder = self._mirror.log_folder if self._mirror is not None else None
        self.recorder = record(self.store, log_folder, options.seconds, say)
        self._saver: Saver = saver or self.store.saver(say, self._event)
        self._budget = DiskBudget(
            self.store, options.kept, options.disk_bytes, self._trouble, self.recorder.event
        )
        self._signals = Signals(self.recorder, say)
        self._policy = SavePolicy(options.save_rule, options.seconds, self.recorder, self.folder)
        self._last_step = 0
        self._ended: int | None = None
        self._seen: Receipt | None = None
        self._expected = False
        self._troubles: dict[str, float] = {}
        self._said_lost = False
        self._loops = 0
        self._length = Length()
        self._stopped = self._ending = self._finished = False
        if self._mirror is not None and (doubt := self._mirror.doubt) is not None:
            say(doubt)

    # -- the start --------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The checkpoint to resume from, asked for once and first: the newest good one here or in the mirror."""
        try:
            found = newest_good(self.store, self._mirror, say, self._trouble)
        except BaseException:
            self.finish()
            raise
        if self._mirror is not None:
            attempt = self.recorder.attempt
            try:
                self._mirror.start(attempt.folder if attempt is not None else None)
            except (OSError, SubprocessError) as error:
                self._trouble("mirror", f"nothing is copied to the mirror {self._mirror.shown}: {error}")
        return found

    def expect(self, items: Mapping[str, object], as_tensor: AsTensor) -> None:
        """Before the first step: refuse what cannot be saved, and say what the checkpoints will take."""
        size = self._saver.size(items, as_tensor)
        self._expected = True
        plan = self._budget.plan(size, self._hours_left)
        if plan.fits == 0:
            raise UsageError(
                "there is no room for one checkpoint",
                received=plan.words,
                expected=f"{format_bytes(size)} and the same again for the next one",
                hint="free some space, name another folder, or allow more with `disk=`",
            )
        say(plan.words)

    # -- between two steps ------------------------------------------------------------------------------------

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around the iteration over batches: only inside are SIGTERM and Ctrl-C held back until the step is done."""
        self._loops += 1
        self._policy.look_again()  # a notebook may have trained another run in between
        self._signals.arm()
        try:
            yield
        finally:
            self._loops -= 1
            if not self._loops:
                self.recorder.pauses(self.folder)
                self._signals.disarm()

    def claim_step(self, step: int) -> None:
        """An optimizer steps: what a kernel's recorder counts now belongs to this run."""
        self.recorder.claims(self.folder, step)

    def epoch_begins(self, epoch: int, of: int | None, step: int, *, is_whole: bool = True) -> None:
        """For the flight log: where the training is, and how long it will be."""
        self.recorder.epoch(epoch)
        end = self._length.epoch_begins(epoch, of=of, step=step, is_whole=is_whole)
        if end is not None:
            self.recorder.lasts(self.folder, end)

    @property
    def is_stopping(self) -> bool:
        """A signal has asked this process to end, and waits for the checkpoint."""
        return self._signals.asked is not None

    def due(self, step: int) -> str | None:
        """The reason to save now, between two steps, or None. Costs less than a microsecond when there is none."""
        if self._signals.asked is None and self._policy.is_early(step):
            return None
        try:
            return self._look_closely(step)
        except Exception as error:  # noqa: BLE001 - a guard that fails must not end the training
            self._trouble("due", f"cannot tell whether a checkpoint is due: {error!r}")
            self._policy.look_again(later=True)
            return None

    def _look_closely(self, step: int) -> str | None:
        now = time.monotonic()
        self.recorder.trains(self.folder, step)
        self._policy.begin(now, step)
        if self._signals.asked is not None:
            return self._signals.asked
        self._signals.arm()
        self._collect(now, step)
        if self._mirror is not None:
            self._mirror.report(now, self._trouble, say)
        busy = (
            self._saver.busy() and not self._saver.is_overdue()
        )  # one that hangs is given up by the next save
        mirror_seconds = self._mirror.seconds_to_copy if self._mirror is not None and not busy else 0.0
        return self._policy.reason(now, step, busy=busy, mirror_seconds=mirror_seconds)

    # -- saving -----------------------------------------------------------------------------------------------

    def save(
        self,
        items: Mapping[str, object],
        *,
        step: int,
        epoch: int | None,
        reason: str,
        as_tensor: AsTensor,
        metrics: Mapping[str, float] | None = None,
        pin: str | None = None,
        finished: bool = False,
        finite: bool | None = None,
        wait: bool = False,
    ) -> Receipt:
        """Make a checkpoint. Once it returns without an error, a SIGKILL of this process loses nothing.

        `finite`: whether the loss is a finite number; None where that is not known.
        """
        pin = self._policy.pin(reason, pin)
        if step != self._ended:  # the end, saved once more under another name, is no training
            self.recorder.trains(self.folder, step)  # a loop that is not ours shows itself only here
        about: dict[str, object] = {
            "step": step,
            "epoch": epoch,
            "reason": reason,
            "metrics": {name: _plain_number(value) for name, value in (metrics or {}).items()},
            "pin": pin,
            "finished": finished,
            "finite": finite,
            "time": time.time(),
        }
        began = time.monotonic()
        # The end of the main process may be the end of its container, and of the writer with it.
        self._stopped = reason in ENDING
        self._ending = finished or self._stopped
        wait = wait or self._ending
        with self.recorder.phase("checkpoint"):
            try:
                most = self._most_wait()
                # It would wait for the one before anyway; now its bytes can be counted.
                self._saver.wait(most)
                self._collect(began, step)
                if finite is False and not self._said_lost:
                    self._said_lost = True
                    say(self._budget.lost(step))
                for tries in count():
                    left = most - (time.monotonic() - began) if most is not None else None
                    receipt = self._saver.save(
                        items, about, as_tensor, wait=wait, make_room=self._budget.make_room, most=left
                    )
                    if not self._gave_way(receipt, tries):
                        break
            except Exception as error:
                if isinstance(error, BuoyError) and not self._expected:
                    raise  # nothing was saved or promised yet: this is the start, and the user's to fix
                words = " ".join(str(error).split()) if isinstance(error, BuoyError) else repr(error)
                receipt = Receipt(step, "", 0, time.monotonic() - began, None, words)
        if finished and receipt.error is None:
            self._ended = step
            self.recorder.trained(self.folder, step, True)
        elif finished:
            no_room = receipt.errno in _FULL
            self.recorder.trained(self.folder, step, False, unsaved=receipt.error, no_room=no_room)
        now = time.monotonic()
        self._last_step = step
        self._policy.tried(now, step)
        if receipt.error is not None:
            self._seen = self._saver.last()
            self._failed(receipt, now)
            return receipt
        self._policy.handed_over(began, now, step)
        self.recorder.event("save", what="buoy", path=receipt.folder, step=step, reason=reason)
        if self._stopped and receipt.committed:
            say(f"step {step} is saved")
        self._collect(now, step)
        return receipt

    def _most_wait(self) -> float | None:
        """Seconds for a checkpoint that is still being written, where the end is near; None: as long as is usual."""
        if self._stopped:
            return _GRACE_SECONDS
        left = self._policy.seconds_left
        return max(1.0, left / 4) if left is not None else None

    def stop_if_asked(self) -> None:
        """After the save that a signal asked for: end as that signal would have ended it. Does nothing otherwise."""
        __tracebackhide__ = True
        if self._signals.asked is not None and not self._stopped:
            self._make_it_the_last()
        self._signals.answer()

    def _make_it_the_last(self) -> None:
        """The signal came while a checkpoint was made for another reason: of this step there is none to make."""
        self._ending = True
        receipt = self._saver.wait(_GRACE_SECONDS)
        if receipt is not None:
            self._collect(time.monotonic(), receipt.step)
            if receipt.committed:
                say(f"step {receipt.step} is saved")

    def finish(self) -> None:
        """The training is over: wait for the writer, tidy up, restore the signal handlers."""
        if self._finished:
            return
        self._finished = True
        self._signals.let_go()
        self.recorder.trained(self.folder, self.recorder.beacon.count, False)
        try:
            self._saver.wait()
            self._collect(time.monotonic(), self._last_step)
            self._budget.settle()
            self._saver.close()
            if self._mirror is not None:
                newest = next((entry for entry in self.store.list() if entry.complete), None)
                if newest is not None:
                    self._mirror.finish(newest.step, newest.time, say)
        except Exception as error:  # noqa: BLE001 - what was committed is safe; the training is done
            self._trouble("finish", f"the last checkpoint could not be finished: {error!r}")

    # -- what became of it ------------------------------------------------------------------------------------

    def _collect(self, now: float, step: int) -> None:
        """Take note of a write that has ended since the last look."""
        receipt = self._saver.last()
        if receipt is None or receipt is self._seen:
            return
        self._seen = receipt
        if receipt.error is not None:
            self._failed(receipt, now)
            return
        self._expected = True
        self.store.trust(receipt)
        changed = self._budget.learn(receipt.bytes, self._hours_left)
        chosen = self._policy.safe(receipt, now, step)
        for words in (changed, chosen):
            if words is not None and not self._ending:
                say(words)
        self._budget.tidy()

    def _gave_way(self, receipt: Receipt, tries: int = 0) -> bool:
        """Whether the disk was full and an older one has made room: then it is worth trying again at once.

        So it is at the end, after which there is no later, where the disk says that it has room.
        """
        if receipt.errno not in _FULL or receipt.bytes <= 0:
            return False
        is_last = self._ending and tries > 0
        is_sure = receipt.errno == errno.EDQUOT or self._policy.failures >= PASSING or is_last
        return self._budget.give_way(receipt.bytes, is_sure=is_sure) or (self._ending and not is_sure)

    def _failed(self, receipt: Receipt, now: float) -> None:
        if not self._ending and self._gave_way(receipt):
            self._policy.repeat()
            return
        pause = self._policy.failed(now)
        newest = self._budget.newest_step()
        room = self._budget.room_in_words(receipt.bytes) if receipt.errno in _FULL and receipt.bytes else ""
        error = f"{receipt.error}{room}"
        stands = f"step {newest} is the newest that is safe" if newest is not None else "nothing is saved yet"
        if self._ending:  # there is no next try, and nobody looks at the log of what ended well
            words = f"the end of the training, step {receipt.step}, was not saved: {error}; {stands}"
            self.recorder.event("trouble", what=words)
            say(words)
            return
        self._trouble(
            "save",
            f"step {receipt.step} was not saved: {error}; {stands}; training continues; next try in "
            f"{format_duration(pause)}",
        )

    def _event(self, kind: str, **values: object) -> None:
        self.recorder.event(kind, **values)

    def _trouble(self, topic: str, text: str) -> None:
        """Say it once, then rarely; the log has it each time."""
        self.recorder.event("trouble", what=text)
        now = time.monotonic()
        if now - self._troubles.get(topic, -inf) >= _NAG_SECONDS:
            self._troubles[topic] = now
            say(text)

    @property
    def _hours_left(self) -> float | None:
        left = self._policy.seconds_left
        return left / 3600 if left is not None else None


def _plain_number(value: object) -> float | None:
    """A metric as a number that JSON has; what is not finite is not known."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if isfinite(number) else None
