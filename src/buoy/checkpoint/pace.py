"""How fast the writer may be: all the disk gives while the trainer waits, a trickle while it computes.

A training on two cores feels every thread that wants a third one. So the writer works in small bites and rests
in between for as long as the trainer is using the processor.
"""

from __future__ import annotations

import threading
import time

from buoy.machine.procfs import ProcessReader

BUSY_BYTES_PER_SECOND = 200 << 20
"""Each of checksum and write, while the trainer computes."""

_LOOK_EVERY = 0.03
_BUSY_SHARE = 0.3  # of one core


class Pace:
    """Asked by the writer's threads after each bite."""

    def __init__(self, trainer: int) -> None:
        self._process = ProcessReader(trainer)
        self._looking = threading.Lock()
        self._looked = time.monotonic()
        self._ticks = self._cpu_seconds()
        self._busy = False

    def rest(self, size: int, began: float) -> None:
        """After a bite of `size` bytes begun at `began` (monotonic): sleep if the trainer needs the processor."""
        self._look()
        if self._busy:
            left = began + size / BUSY_BYTES_PER_SECOND - time.monotonic()
            if left > 0:
                time.sleep(left)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY or not self._looking.acquire(blocking=False):
            return
        try:
            used = self._cpu_seconds()
            elapsed = now - self._looked
            self._busy = (
                used is not None and self._ticks is not None and used - self._ticks > _BUSY_SHARE * elapsed
            )
            self._looked, self._ticks = now, used
        finally:
            self._looking.release()

    def _cpu_seconds(self) -> float | None:
        """The trainer's processor time; None once it is dead."""
        found = self._process.stat()
        return None if found is None else found.cpu_seconds
