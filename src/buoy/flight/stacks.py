"""Asks a training process what only it can say when a death may be near: its stacks, and what holds its memory.

It writes the stacks itself (in C, see last_words.py), and names the variables (see holders.py). Without a handler
the signals would kill, so they are sent only to a process that is seen to handle them.
"""

from __future__ import annotations

import os
import signal

from buoy.flight.log import EventLog
from buoy.machine import procfs
from buoy.machine.files import read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from buoy.flight.sampler import Sampler

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 5  # elsewhere than on Linux it is never sent
"""Not SIGUSR1: Lightning and SLURM use that one."""
HOLDERS_SIGNAL = STACKS_SIGNAL + 1
ANSWER = "holders.json"
"""The file in a process's folder with its last answer about what holds its memory."""
_DUMPS_MOST = _ASKS_MOST = 40
_AGAIN_SECONDS = 10.0
_NEAR, _BACK = (0.85, 0.92, 0.97), 0.1
_HOLDERS_PAUSE, _FRESH, _PATIENCE = 2.0, 10.0, 10.0
"""Seconds: between two requests, for which an answer is good, and until it is given up."""
_AFTER_STACKS, _SENT_AGAIN = 0.05, 2.5
"""Seconds: `faulthandler` drops a signal that comes while it still writes for another one."""
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


class HolderAsker:
    """Asks which variables hold memory: when a warning is given, and before that as memory runs short."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid: int | None = None
        """Whose answer is awaited."""
        self._asks = 0
        self.asked = self._answered = -_HOLDERS_PAUSE
        """When it was last asked, and when it last answered."""
        self._next = 0.0
        self._answer: dict | None = None  # type: ignore[type-arg]
        self._level = 0.0
        self._alarm: str | None = None

    def warned(self, alarm: str, pid: int, now: float) -> None:
        """A warning was given: the holders are to be named in another, at once if they are known."""
        self._alarm = alarm
        if now - self._answered > _FRESH:
            self._answer = None
            self._ask(pid, now)

    def near_exhaustion(self, pressure: float, pid: int, now: float) -> None:
        """Ask at each level once, for the verdict alone: what grows fast kills before any warning."""
        level = max((mark for mark in _NEAR if pressure >= mark), default=0.0)
        if level > self._level and now - self.asked >= _HOLDERS_PAUSE:
            self._level = level
            self._ask(pid, now)
        elif pressure < self._level - _BACK:
            self._level = level

    def _ask(self, pid: int, now: float) -> None:
        if self._pid is None and self._asks < _ASKS_MOST and procfs.handles_signal(pid, HOLDERS_SIGNAL):
            self._asks += 1
            self._pid, self.asked, self._next = pid, now, now + _AFTER_STACKS

    def hear(self, now: float) -> dict | None:  # type: ignore[type-arg]
        """A new answer, or after a while that there is none; else None. Asks, until there is one."""
        if self._pid is None:
            return None
        found = read_json(os.path.join(self._folder, f"process-{self._pid}", ANSWER))
        if found is None or not found.get("t", 0.0) >= self.asked:
            if now - self.asked < _PATIENCE:
                self._send(self._pid, now)
                return None
            found = {"error": f"Python did not answer for {_PATIENCE:.0f} s; a call into C may keep it busy"}
        found["pid"], self._pid = self._pid, None
        self._answer, self._answered = found, now
        return found

    def _send(self, pid: int, now: float) -> None:
        if now >= self._next and procfs.handles_signal(pid, HOLDERS_SIGNAL):
            self._next = now + _SENT_AGAIN
            try:
                os.kill(pid, HOLDERS_SIGNAL)
            except OSError:
                pass  # it has just died

    def to_tell(self) -> tuple[str, str] | None:
        """The alarm whose warning still lacks the names, and the line that has them; None: nothing to tell."""
        if self._alarm is None or self._answer is None or self._pid is not None:
            return None
        alarm, self._alarm = self._alarm, None
        from buoy.flight.holders import sentence  # most sidecars never need it

        text = sentence(self._answer, on_device=alarm == "vram")
        return (alarm, text) if text is not None else None


class Holders:
    """Which variables hold the training's memory: written down when that runs short, and named after a warning."""

    def __init__(self, folder: str, events: EventLog, sampler: Sampler) -> None:
        self._events, self._sampler = events, sampler
        self._asker = HolderAsker(folder)

    def tick(self, now: float, alarms: list[str]) -> str | None:
        """Ask if it is time, after these alarms; the line that names the variables, once there is one to be said."""
        for alarm in alarms:
            if alarm in _MEMORY:
                self._asker.warned(alarm, self._largest(), now)
        self._asker.near_exhaustion(self._sampler.pressure, self._largest(), now)
        return self._hear(now)

    def hear_last(self) -> None:
        """It has died: an answer may have come with its last breath."""
        try:
            self._hear(self._asker.asked)
        except Exception:  # noqa: BLE001 - the death itself is what must be written down
            pass

    def _hear(self, now: float) -> str | None:
        answer = self._asker.hear(now)
        if answer is not None:
            spared = {answer["pid"], *self._sampler.helpers}
            others = [size for pid, size in self._sampler.rss.items() if pid not in spared]
            answer |= {"children": len(others), "children_bytes": sum(others)}
            self._events.add("holders", **{key: answer[key] for key in answer if key not in ("t", "wall")})
        told = self._asker.to_tell()
        if told is None:
            return None
        self._events.add("warning", alarm="holders", text=told[1], values={"of": told[0]})
        return told[1]

    def _largest(self) -> int:
        """The process that can be asked and holds the most: below a shell or a launcher that is another one."""
        sizes = {pid: self._sampler.rss.get(pid, 0) for pid in self._sampler.beacons}
        return max(sizes, key=lambda pid: sizes[pid], default=self._sampler.pid)
