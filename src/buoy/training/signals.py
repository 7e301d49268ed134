"""SIGTERM and Ctrl-C while a training loop runs: first a checkpoint at the end of the step, then what the signal asks.

The handlers that were there before are restored before they are called, so the process ends exactly as it would
have ended: killed by SIGTERM, with a KeyboardInterrupt, or as the user's own handler wants it.

Terminals, `timeout` and schedulers signal a whole process group. Workers that die of the same signal would take the
step with them: those that are forked while the loop runs leave the group, and what a handler of SIGCHLD raises
about the others (torch's does, anywhere) waits until the signal is answered.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.popen_fork import Popen
from types import FrameType
from weakref import WeakSet

from buoy.flight.last_words import OURS, show_until
from buoy.flight.recorder import Recorder
from buoy.machine.process import leave_group
from buoy.units import format_duration

GRACE_SECONDS = 20.0
"""Who sends SIGTERM mostly waits 30 s before SIGKILL: a step that takes longer than this is not waited for."""
_ECHO = {signal.SIGTERM: 2.0, signal.SIGINT: 0.3}
"""The same signal again within this time is the same request: `timeout` and some launchers send it twice."""
_REASONS = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupt"}

Handler = Callable[[int, FrameType | None], object] | int | None


class Signals:
    """Holds SIGTERM and Ctrl-C back until the step is done. Active between `arm` and `disarm` only."""

    def __init__(self, recorder: Recorder, say: Callable[[str], None], grace: float = GRACE_SECONDS) -> None:
        self._recorder = recorder
        self._say = say
        self._grace = grace
        self._before: dict[int, Handler] = {}
        self._owner, self._main = os.getpid(), threading.main_thread()
        self._number: int | None = None
        self._since = 0.0
        self._late = False
        self._timer: threading.Timer | None = None
        self._on_child: Callable[[int, FrameType | None], object] | None = None
        """The handler of SIGCHLD, while it is not called."""
        self._child_ended = False
        self.asked: str | None = None
        """`sigterm` or `interrupt` once one has come, else None: the reason to save at the next safe point."""

    def arm(self) -> None:
        """Take the signals over; nothing in threads other than the main one, nor where they are ignored."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner, self._main = os.getpid(), threading.main_thread()
        _forks.watch(self)
        for number in _REASONS:
            before = signal.getsignal(number)
            # None: a handler that Python did not install and could not restore.
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                self._recorder.set_handler(number, self._on_signal)

    def disarm(self) -> None:
        """Restore what was there, unless somebody else has taken the signal over since."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._on_signal:
                self._recorder.set_handler(number, before)

    def let_go(self) -> None:
        """The training is over; a signal that was never answered is forgotten."""
        self.disarm()
        if threading.current_thread() is threading.main_thread():
            self._hear_of_children()

    def answer(self) -> None:
        """The checkpoint is made: let the signal that asked for it act as if it came now."""
        __tracebackhide__ = True
        if self._number is not None:
            try:
                self._act(self._number, None)
            except KeyboardInterrupt as error:
                show_until(error, OURS)
                raise

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if os.getpid() != self._owner:
            self._in_child(number, frame)
            return
        now = time.monotonic()
        if self._number is None:
            self._number, self._since = number, now
            self._put_off_children()
            self.asked = _REASONS[signal.Signals(number)]
            self._announce(number)
        elif self._late or number != self._number or now - self._since > _ECHO[signal.Signals(number)]:
            try:
                self._act(number, frame)
            except KeyboardInterrupt as error:
                show_until(error, __file__)  # whatever was interrupted, ours too, stays in sight
                raise

    def _in_child(self, number: int, frame: FrameType | None) -> None:
        """A forked worker: SIGTERM ends it as ever; of Ctrl-C the first is the training's own to answer."""
        if _forks.is_new:
            return  # nobody knew of this process: the signal was to the training's group
        if number == signal.SIGINT and self._number is None:
            self._number = number
            return
        self._act(number, frame)

    def leave_in_worker(self) -> None:
        """In a process that was just forked: out of reach of signals to the training's group, if there is a loop."""
        if self._before:
            leave_group(end_with_parent=threading.main_thread() is self._main)

    def _put_off_children(self) -> None:
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler):
            self._on_child, self._child_ended = handler, False
            signal.signal(signal.SIGCHLD, self._note_child)

    def _note_child(self, number: int, frame: FrameType | None) -> None:
        self._child_ended = True

    def _hear_of_children(self) -> Callable[[int, FrameType | None], object] | None:
        """Restore the handler of SIGCHLD; returned where it was not called and is to be."""
        handler, self._on_child = self._on_child, None
        if handler is None or signal.getsignal(signal.SIGCHLD) != self._note_child:
            return None
        signal.signal(signal.SIGCHLD, handler)
        return handler if self._child_ended else None

    def _announce(self, number: int) -> None:
        if number == signal.SIGINT:
            self._say("saving a checkpoint after this step; press Ctrl-C again to stop at once")
            return
        self._say("received SIGTERM: saving a checkpoint after this step")
        self._timer = threading.Timer(self._grace, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    def _too_late(self) -> None:
        if self._number == signal.SIGTERM:
            self._say(
                f"no step ended within {format_duration(self._grace)} of SIGTERM: stopping without a new checkpoint"
            )
            self._late = True
            os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, where handlers may be restored

    def _act(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        before = self._before.get(number, signal.SIG_DFL)
        self._number = self.asked = None
        self._late = False
        if self._timer is not None:
            self._timer.cancel()
        self.disarm()
        on_child = self._hear_of_children()
        if callable(before):
            before(number, frame)
        else:
            os.kill(os.getpid(), number)
        if on_child is not None:
            on_child(signal.SIGCHLD, None)


class _Forks:
    """Takes new workers out of the training's process group, before a signal to it can reach them."""

    def __init__(self) -> None:
        self._armed: WeakSet[Signals] = WeakSet()
        self._is_watched = False
        self.is_new = False
        """This process was just forked."""

    def watch(self, signals: Signals) -> None:
        self._armed.add(signals)
        if not self._is_watched:
            self._is_watched = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
            )

    def _before(self) -> None:
        self.is_new = True

    def _in_parent(self) -> None:
        self.is_new = False

    def _in_child(self) -> None:
        """Only what `multiprocessing` starts as a daemon is a worker for certain: others may outlive the training."""
        caller, launch = sys._getframe(1), Popen._launch.__code__  # type: ignore[attr-defined]
        process = caller.f_locals.get("process_obj") if caller.f_code is launch else None
        if process is not None and process.daemon:
            for signals in self._armed:
                signals.leave_in_worker()
        self.is_new = False


_forks = _Forks()
