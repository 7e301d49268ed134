"""Asks a training process for the stacks of all its threads, when a death may be near.

The process writes them itself (in C, see last_words.py). Without that handler the signal would kill,
so it is sent only to a process that is seen to handle it.
"""

from __future__ import annotations

import os
import signal

from buoy.flight.log import EventLog
from buoy.machine import procfs

STACKS_SIGNAL = signal.SIGRTMIN + 5
"""Not SIGUSR1: Lightning and SLURM use that one."""
_DUMPS_MOST = 40
_AGAIN_SECONDS = 10.0
_NEAR = (0.85, 0.92, 0.97)


class StackAsker:
    """Asks at most a few dozen times in an attempt, so that the file stays small."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._asked = 0
        self._asked_at: dict[float, float] = {}

    def ask(self, pid: int, why: str) -> None:
        """Ask this process now."""
        if self._asked >= _DUMPS_MOST or not procfs.handles_signal(pid, STACKS_SIGNAL):
            return
        try:
            os.kill(pid, STACKS_SIGNAL)
        except OSError:
            return
        self._asked += 1
        self._events.add("stacks", pid=pid, why=why)

    def near_exhaustion(self, pressure: float, pid: int, now: float) -> None:
        """Ask as memory runs short: after a kernel kill these stacks are all that says where it was."""
        level = max((mark for mark in _NEAR if pressure >= mark), default=None)
        if level is not None and now - self._asked_at.get(level, -_AGAIN_SECONDS) >= _AGAIN_SECONDS:
            self._asked_at[level] = now
            self.ask(pid, f"memory at {100 * pressure:.0f} % of its limit")
