"""SIGTERM and Ctrl-C while a training loop runs: first a checkpoint at the end of the step, then what the signal asks.

The handlers that were there before are put back before they are called, so the process ends exactly as it would
have ended: killed by SIGTERM, with a KeyboardInterrupt, or as the user's own handler wants it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from buoy.flight.last_words import OURS, show_until
from buoy.flight.recorder import Recorder
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
        self._owner = os.getpid()
        self._number: int | None = None
        self._since = 0.0
        self._late = False
        self._timer: threading.Timer | None = None
        self.asked: str | None = None
        """`sigterm` or `interrupt` once one has come, else None: the reason to save at the next safe point."""

    def arm(self) -> None:
        """Take the signals over; nothing in threads other than the main one, nor where they are ignored."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        for number in _REASONS:
            before = signal.getsignal(number)
            # None: a handler that Python did not install and could not put back.
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                self._recorder.set_handler(number, self._on_signal)

    def disarm(self) -> None:
        """Put back what was there, unless somebody else has taken the signal over since."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._on_signal:
                self._recorder.set_handler(number, before)

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
        if number == signal.SIGINT and self._number is None:
            self._number = number
            return
        self._act(number, frame)

    def _announce(self, number: int) -> None:
        if number == signal.SIGINT:
            self._say("saving after this step; press Ctrl-C again to stop at once")
            return
        self._say("told to stop (SIGTERM): saving after this step")
        self._timer = threading.Timer(self._grace, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    def _too_late(self) -> None:
        if self._number == signal.SIGTERM:
            self._say(
                f"no step ended within {format_duration(self._grace)} of SIGTERM: stopping without a new checkpoint"
            )
            self._late = True
            os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, where handlers may be put back

    def _act(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        before = self._before.get(number, signal.SIG_DFL)
        self._number = self.asked = None
        self._late = False
        if self._timer is not None:
            self._timer.cancel()
        self.disarm()
        if callable(before):
            before(number, frame)
        else:
            os.kill(os.getpid(), number)
