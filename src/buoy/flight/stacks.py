"""Asks a training process what only it can say when a death may be near: its stacks, and what holds its memory.

It writes the stacks itself (in C, see last_words.py), and names the variables (see holders.py). Without a handler
the signals would kill, so they are sent only to a process that is seen to handle them.
"""

from __future__ import annotations

import os
import signal

from buoy.flight.log import EventLog
from buoy.machine import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from buoy.flight.holders import HolderAsker
    from buoy.flight.sampler import Sampler

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 5  # elsewhere than on Linux it is never sent
"""Not SIGUSR1: Lightning and SLURM use that one."""
_DUMPS_MOST = 40
_AGAIN_SECONDS = 10.0
_NEAR = (0.85, 0.92, 0.97)
_MEMORY = ("ram", "ram-level", "vram")
"""Alarms after which the variables that hold memory are named."""


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


class Holders:
    """Which variables hold the training's memory: written down when that runs short, and named after a warning."""

    def __init__(self, folder: str, events: EventLog, sampler: Sampler) -> None:
        self._folder, self._events, self._sampler = folder, events, sampler
        self._asker: HolderAsker | None = None

    def tick(self, now: float, alarms: list[str]) -> str | None:
        """Ask if it is time, after these alarms; the line that names the variables, once there is one to be said."""
        alarms = [alarm for alarm in alarms if alarm in _MEMORY]
        if self._asker is None:
            if not alarms and self._sampler.pressure < _NEAR[0]:
                return None
            from buoy.flight.holders import HolderAsker  # only now: most sidecars never need it

            self._asker = HolderAsker(self._folder)
        for alarm in alarms:
            self._asker.warned(alarm, self._largest(), now)
        self._asker.near_exhaustion(self._sampler.pressure, self._largest(), now)
        return self._hear(self._asker, now)

    def hear_last(self) -> None:
        """It has died: an answer may have come with its last breath."""
        try:
            if self._asker is not None:
                self._hear(self._asker, self._asker.asked)
        except Exception:  # noqa: BLE001 - the death itself is what must be written down
            pass

    def _hear(self, asker: HolderAsker, now: float) -> str | None:
        answer = asker.hear(now)
        if answer is not None:
            spared = {answer["pid"], *self._sampler.helpers}
            others = [size for pid, size in self._sampler.rss.items() if pid not in spared]
            answer |= {"children": len(others), "children_bytes": sum(others)}
            self._events.add("holders", **{key: answer[key] for key in answer if key not in ("t", "wall")})
        told = asker.to_tell()
        if told is None:
            return None
        self._events.add("warning", alarm="holders", text=told[1], values={"of": told[0]})
        return told[1]

    def _largest(self) -> int:
        """The process that can be asked and holds the most: below a shell or a launcher that is another one."""
        sizes = {pid: self._sampler.rss.get(pid, 0) for pid in self._sampler.beacons}
        return max(sizes, key=lambda pid: sizes[pid], default=self._sampler.pid)
