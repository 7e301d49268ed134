"""The keeper of one run's checkpoints: when to save, what to keep, and what to say. Knows no framework.

`buoy.Run` (PyTorch) and `buoy.keras.Guard` hold one each. They ask `due` between two steps, hand over what is to be
saved, and let `stop_if_asked` end the process when a signal wanted that. What fails here is said and survived;
only what the person must mend before training begins is raised.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from math import inf, isfinite
from subprocess import SubprocessError

from buoy.checkpoint import schedule
from buoy.checkpoint.budget import PASSING
from buoy.checkpoint.mirror import Mirror
from buoy.checkpoint.retention import Keep, as_keep
from buoy.checkpoint.saver import Saver
from buoy.checkpoint.search import newest_good
from buoy.checkpoint.state import AsTensor
from buoy.checkpoint.store import Checkpoint, Receipt, Store, WriterBusy
from buoy.errors import BuoyError, UsageError
from buoy.planner import rehearsal
from buoy.supervisor.start import limit_seconds
from buoy.training import deadline
from buoy.training.alarms import Alarms
from buoy.training.length import Length
from buoy.training.recording import record, refused
from buoy.training.rhythm import Interval, Pace
from buoy.training.saying import say
from buoy.training.shelf import Shelf
from buoy.training.signals import Signals
from buoy.units import format_bytes, format_duration, parse_bytes

_LOOK_SECONDS = 2.0
_LOOK_WHILE_WRITING = 0.05
_RETRY_SECONDS = 60.0
_RETRY_MOST = 900.0
_NAG_SECONDS = 900.0
"""A trouble that lasts is told again this rarely."""
_GRACE_SECONDS = 10.0
"""Who has sent a signal will not wait much longer for a writer that hangs."""
_ENDING = ("sigterm", "interrupt")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Keeper:
    """Keeps one run's checkpoints; one per process and run folder."""

    def __init__(
        self,
        folder: str,
        *,
        mirror: str | None = None,
        time_limit: str | float | None = None,
        disk: str | None = None,
        save: str | int | None = None,
        keep: Keep | int | None = None,
    ) -> None:
        if rehearsal.is_rehearsal():
            folder, mirror = rehearsal.scratch_folder(), None
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._rule = schedule.parse_rule(save)
        wish = as_keep(keep)
        allowed = parse_bytes(disk) if disk is not None else None
        given = limit_seconds(time_limit)
        self._mirror = Mirror(self.folder, mirror, wish) if mirror is not None else None
        self.store = Store(self.folder)
        log_home = self._mirror.log_folder if self._mirror is not None else None
        # Of a run that is there already the lock comes first: who is refused leaves no attempt behind.
        try:
            saver = self.store.saver(say, self._event) if os.path.isdir(self.store.checkpoints) else None
        except WriterBusy:
            refused(self.folder)
            raise
        self.recorder = record(self.store, log_home, given, say)
        self._saver: Saver = saver or self.store.saver(say, self._event)
        self._shelf = Shelf(self.store, wish, allowed, self._trouble, self.recorder.event)
        self._signals = Signals(self.recorder, say)
        self._deadline = deadline.find(self.recorder.attempt, given)
        self._alarms = Alarms(self.recorder)
        self._pace = Pace()
        self._interval = Interval(self._rule, self._mean_life())
        self._last_step = 0
        self._ended: int | None = None
        self._step_due: float = inf if self._rule.steps is None else 0
        self._look = 0.0
        self._began: float | None = None
        self._saved: float | None = None
        self._not_before = 0.0
        self._failures = 0
        self._seen: Receipt | None = None
        self._expected = False
        self._again = False
        """The disk was full under the last write, and room was made since."""
        self._asked: tuple[str, str | None] = ("interval", None)  # the last save's reason, and its pin
        self._troubles: dict[str, float] = {}
        self._told_deadline = self._told_lost = False
        self._loops = 0
        self._length = Length()
        self._alarm = self._stopped = self._ending = self._finished = False
        attempt = self.recorder.attempt
        for doubt in self._mirror.doubts if self._mirror is not None else ():
            say(doubt)
        self._with_mirror(lambda mirror: mirror.start(attempt.folder if attempt is not None else None))

    # -- the start --------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The checkpoint to go on from, asked for once and first: the newest good one here or in the mirror."""
        try:
            found = newest_good(self.store, self._mirror, say, self._trouble)
        except BaseException:
            self.finish()
            raise
        self._with_mirror(Mirror.begin)
        return found

    def expect(self, items: Mapping[str, object], as_tensor: AsTensor) -> None:
        """Before the first step: refuse what cannot be saved, and say what the checkpoints will take."""
        size = self._saver.size(items, as_tensor)
        self._expected = True
        plan = self._shelf.plan(size, self._hours_left())
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
        self._look = 0.0  # a notebook may have trained another run in between
        self._signals.arm()
        try:
            yield
        finally:
            self._loops -= 1
            if not self._loops:
                self.recorder.pauses(self.folder)
                self._signals.disarm()

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
        if self._signals.asked is None and step < self._step_due and time.monotonic() < self._look:
            return None
        try:
            return self._look_closely(step)
        except Exception as error:  # noqa: BLE001 - a guard that fails must not end the training
            self._trouble("due", f"cannot tell whether a checkpoint is due: {error!r}")
            self._look = time.monotonic() + _RETRY_SECONDS
            return None

    def _look_closely(self, step: int) -> str | None:
        now = time.monotonic()
        self.recorder.trains(self.folder, step)
        if self._began is None:
            self._began = now
            self._pace.start(now, step)
            if self._rule.steps is not None:
                self._step_due = (step // self._rule.steps + 1) * self._rule.steps
        if self._signals.asked is not None:
            return self._signals.asked
        self._signals.arm()
        self._collect(now, step)
        # One that hangs is given up by the next save.
        busy = self._saver.busy() and not self._saver.is_overdue()
        self._look = now + (_LOOK_WHILE_WRITING if busy else _LOOK_SECONDS)
        if self._mirror is not None:
            self._mirror.tell(now, self._trouble, say)
        if not busy and self._before_the_end(now):
            return "deadline"  # even after failures: there is no later
        if self._again and not busy:
            return self._asked[0]
        if now < self._not_before:
            return None
        if step >= self._step_due:
            return "steps"
        if busy:
            return None  # the next one would have to wait for it
        self._alarm = self._alarm or self._alarms.due(now, self._saved, self._interval.cost)
        if self._alarm:  # until it is answered: this may not have been a moment at which one can save
            return "alarm"
        next_save = self._interval.after(self._saved, self._began)
        if now >= next_save:
            return "interval"
        self._look = min(self._look, next_save)
        return None

    def _before_the_end(self, now: float) -> bool:
        if self._deadline is None:
            return False
        behind = self._mirror.seconds_to_copy if self._mirror is not None else 0.0
        cost = self._interval.cost
        if not self._deadline.due(now, self._saved, cost, behind, self._pace.usual or 0.0):
            return False
        if not self._told_deadline:
            self._told_deadline = True
            say(
                f"the session ends in {format_duration(self._deadline.left(now))}: saving now and then every "
                f"{format_duration(deadline.pause(cost))}; the training goes on until it is ended"
            )
        return True

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
        pin = pin or (self._asked[1] if self._again else None)
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
        self._asked = (reason, pin)
        # The end of the main process may be the end of its container, and of the writer with it.
        self._stopped = reason in _ENDING
        self._ending = finished or self._stopped
        wait = wait or self._ending
        with self.recorder.phase("checkpoint"):
            try:
                most = self._most_wait(began)
                # It would wait for the one before anyway; now its bytes can be counted.
                self._saver.wait(most)
                self._collect(began, step)
                if finite is False and not self._told_lost:
                    self._told_lost = True
                    say(self._shelf.lost(step))
                for tries in count():
                    left = most - (time.monotonic() - began) if most is not None else None
                    receipt = self._saver.save(
                        items, about, as_tensor, wait=wait, make_room=self._shelf.make_room, most=left
                    )
                    if not self._gave_way(receipt, tries):
                        break
            except Exception as error:
                if isinstance(error, BuoyError) and not self._expected:
                    raise  # nothing was saved or promised yet: this is the start, and the person's to mend
                words = " ".join(str(error).split()) if isinstance(error, BuoyError) else repr(error)
                receipt = Receipt(step, "", 0, time.monotonic() - began, None, words)
        if finished and receipt.error is None:
            self._ended = step
            self.recorder.trained(self.folder, step, True)
        elif finished:
            no_room = receipt.errno in _FULL
            self.recorder.trained(self.folder, step, False, unsaved=receipt.error, no_room=no_room)
        now = time.monotonic()
        self._saved, self._last_step, self._alarm, self._again = now, step, False, False
        if self._rule.steps is not None:
            self._step_due = (step // self._rule.steps + 1) * self._rule.steps
        self._look = 0.0
        if receipt.error is not None:
            self._seen = self._saver.last()
            self._failed(receipt, now)
            return receipt
        self._pace.saved(began, now, step)
        self.recorder.event("save", what="buoy", path=receipt.folder, step=step, reason=reason)
        if self._stopped and receipt.committed:
            say(f"step {step} is saved")
        self._collect(now, step)
        return receipt

    def _most_wait(self, now: float) -> float | None:
        """Seconds for a checkpoint that is still being written, where the end is near; None: as long as is usual."""
        if self._stopped:
            return _GRACE_SECONDS
        return max(1.0, self._deadline.left(now) / 4) if self._deadline is not None else None

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
        """The training is over: wait for the writer, tidy up, put the signal handlers back."""
        if self._finished:
            return
        self._finished = True
        self._signals.let_go()
        self.recorder.trained(self.folder, self.recorder.beacon.count, False)
        try:
            self._saver.wait()
            self._collect(time.monotonic(), self._last_step)
            self._shelf.settle()
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
        self._failures, self._not_before = 0, 0.0
        self._expected = True
        self.store.trust(receipt)
        changed = self._shelf.learn(receipt.bytes, self._hours_left())
        chosen = self._interval.learn(self._pace.cost(receipt, now, step))
        for words in (changed, chosen):
            if words is not None and not self._ending:
                say(words)
        self._shelf.tidy()

    def _gave_way(self, receipt: Receipt, tries: int = 0) -> bool:
        """Whether the disk was full and an older one has made room: then it is worth trying again at once.

        So it is at the end, after which there is no later, where the disk says that it has room.
        """
        if receipt.errno not in _FULL or receipt.bytes <= 0:
            return False
        is_last = self._ending and tries > 0
        is_sure = receipt.errno == errno.EDQUOT or self._failures >= PASSING or is_last
        return self._shelf.give_way(receipt.bytes, is_sure=is_sure) or (self._ending and not is_sure)

    def _failed(self, receipt: Receipt, now: float) -> None:
        if not self._ending and self._gave_way(receipt):
            self._again, self._look = True, 0.0
            return
        self._failures += 1
        pause = min(_RETRY_MOST, _RETRY_SECONDS * 2 ** (self._failures - 1))
        self._not_before = now + pause
        newest = self._shelf.newest_step()
        room = self._shelf.room_in_words(receipt.bytes) if receipt.errno in _FULL and receipt.bytes else ""
        error = f"{receipt.error}{room}"
        stands = f"step {newest} is the newest that is safe" if newest is not None else "nothing is saved yet"
        if self._ending:  # there is no next try, and nobody looks at the log of what ended well
            words = f"the end of the training, step {receipt.step}, is not saved: {error}; {stands}"
            self.recorder.event("trouble", what=words)
            say(words)
            return
        self._trouble(
            "save",
            f"step {receipt.step} is not saved: {error}; {stands}; "
            f"the training goes on, the next try is in {format_duration(pause)}",
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

    # -- what is known at the start ---------------------------------------------------------------------------

    def _with_mirror(self, act: Callable[[Mirror], None]) -> None:
        if self._mirror is not None:
            try:
                act(self._mirror)
            except (OSError, SubprocessError) as error:
                self._trouble("mirror", f"nothing is copied to the mirror {self._mirror.shown}: {error}")

    def _hours_left(self) -> float | None:
        return self._deadline.left(time.monotonic()) / 3600 if self._deadline is not None else None

    def _mean_life(self) -> float:
        attempt = self.recorder.attempt
        lives = schedule.lives_of(self.folder, attempt.folder if attempt is not None else None)
        return schedule.mean_life(self._deadline.limit if self._deadline is not None else None, lives)


def _plain_number(value: object) -> float | None:
    """A metric as a number that JSON has; what is not finite is not known."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if isfinite(number) else None
