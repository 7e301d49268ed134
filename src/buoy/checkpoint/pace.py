"""How fast the writer may be: all the disk gives while the trainer waits, a part while it computes, else a trickle.

A training on two cores feels every thread that wants a third one, and on a core of its own the writer still takes of
the memory's speed. So it works in small bites and rests in between, for as long as the trainer computes.
"""

from __future__ import annotations

import os
import threading
import time

from buoy.machine import cgroup
from buoy.machine.procfs import FileReader, ProcessReader
from buoy.machine.system import TICKS

BUSY_BYTES_PER_SECOND = 128 << 20
"""Each of checksum and write, while no core is to spare: together about a fifteenth of one."""
BESIDE_BYTES_PER_SECOND = 384 << 20
"""While the trainer computes and a core is to spare: at full speed its steps took a fifth longer."""

FIRST_BITE = 1 << 20
_IDLE_BITE = 8 << 20
_FIRST_LOOK = 0.03
_LOOK_EVERY = 0.1
_COMPUTING = 0.3  # cores: less is a trainer that waits
_SPARE = 0.5  # cores: more is room enough for the writer


class Pace:
    """Asked by the writer's threads after each bite."""

    def __init__(self, trainer: int) -> None:
        self._process = ProcessReader(trainer)
        self._machine = FileReader("/proc/stat")
        group = cgroup.find(os.getpid())
        self._quota = None if group is None else group.cpu_quota()
        self._looking = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """A new checkpoint: nothing is known about what the trainer does now."""
        self._most: int | None = None
        """Bytes per second; None: whatever the disk gives."""
        self._before = self._seconds()
        self._due = time.monotonic() + _FIRST_LOOK

    def rest(self, size: int, began: float) -> int:
        """After a bite of `size` bytes begun at `began` (monotonic): sleep if the trainer needs the processor.

        Returns how many bytes to take next: many where nobody is disturbed, which is faster.
        """
        self._look()
        if self._most is None:
            return _IDLE_BITE
        left = began + size / self._most - time.monotonic()
        if left > 0:
            time.sleep(left)
        return FIRST_BITE

    def _look(self) -> None:
        if time.monotonic() < self._due or not self._looking.acquire(blocking=False):
            return
        try:
            now = self._seconds()
            self._most = _allowed(self._before, now, self._quota)
            self._before = now
            self._due = time.monotonic() + _LOOK_EVERY
        finally:
            self._looking.release()

    def _seconds(self) -> tuple[float, float | None, float, float | None]:
        """The clock, and processor seconds: of the trainer (None: dead), our own, and left idle on all cores."""
        found = self._process.stat()
        trainer = None if found is None or found.state in ("Z", "X") else found.cpu_seconds
        words = self._machine.read(256).split(b"\n", 1)[0].split()
        idle = (int(words[4]) + int(words[5])) / TICKS if len(words) > 5 and words[0] == b"cpu" else None
        return time.monotonic(), trainer, time.process_time(), idle


def _allowed(
    before: tuple[float, float | None, float, float | None],
    now: tuple[float, float | None, float, float | None],
    quota: float | None,
) -> int | None:
    elapsed = now[0] - before[0]
    if now[1] is None or before[1] is None or elapsed <= 0:
        return None  # nobody is left to be slowed
    trainer, ours = (now[1] - before[1]) / elapsed, (now[2] - before[2]) / elapsed
    if trainer < _COMPUTING:
        return None
    spare = [] if quota is None else [quota - trainer]
    if now[3] is not None and before[3] is not None:
        spare.append((now[3] - before[3]) / elapsed + ours)
    return BUSY_BYTES_PER_SECOND if min(spare, default=0.0) < _SPARE else BESIDE_BYTES_PER_SECOND
