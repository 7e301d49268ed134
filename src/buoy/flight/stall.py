"""Is the training stuck? Told from the age of the last step and from whether its processes do anything.

- **idle**: no CPU time and no I/O to speak of: blocked (a deadlock, a receive that never returns). Told soon.
- **busy**: it may be an evaluation that nobody marked, or an endless loop. Told late, and later still in a
  marked evaluation or save.

Every limit has a floor in seconds and grows with what this run has shown: the time a step takes, and the
longest pause it has come out of by itself. Time in which the watcher was not running (a suspended machine)
does not count.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_IDLE_FLOOR = 30.0
_FIRST_STEP_FLOOR = 120.0
_BUSY_FLOOR = 300.0
_IDLE_STEPS = 20.0
_BUSY_STEPS = 50.0
_MARKED_PHASE_FACTOR = 4.0
_PAUSE_FACTOR = 1.5

_IDLE_CPU_SHARE = 0.03
_IDLE_CPU_SECONDS = 0.15
"""CPU time that a stretch of idleness may hold whatever its length: a progress bar is not life."""
_IDLE_IO_RATE = 4096.0
"""Bytes per second below which I/O is a heartbeat or a log line, not work."""
_IDLE_GPU_UTIL = 5.0
_LONGEST_GAP = 5.0
"""Seconds between two samples beyond which the watcher itself was not running."""


class Hang:
    """A stall worth telling, once."""

    __slots__ = ("age", "cpu_share", "idle", "phase", "step", "step_seconds", "threshold")

    def __init__(
        self,
        idle: bool,
        age: float,
        threshold: float,
        cpu_share: float | None,
        step: int,
        phase: str | None,
        step_seconds: float | None,
    ) -> None:
        self.idle = idle
        self.age = age
        """Seconds since the last sign of progress."""
        self.threshold = threshold
        self.cpu_share = cpu_share
        """Of one core, since that sign; None when not known."""
        self.step = step
        self.phase = phase
        self.step_seconds = step_seconds

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


class HangOver:
    """Progress came again after a hang that was told."""

    __slots__ = ("age", "step")

    def __init__(self, step: int, age: float) -> None:
        self.step = step
        self.age = age
        """Seconds the pause lasted."""

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {"step": self.step, "age": self.age}


class StallWatch:
    """Watches one training process tree, fed about once a second.

    `floor_seconds` (BUOY_HANG_SECONDS) replaces every floor, for tests and impatient people.
    """

    def __init__(self, floor_seconds: float | None = None) -> None:
        self._floor = floor_seconds
        self._t: float | None = None
        self._awake = 0.0  # seconds watched, without gaps: the clock of everything below
        self._progress: tuple[int, float | None, str | None] | None = None
        self._progress_at = 0.0
        self._progress_cpu: float | None = None
        self._idle_at = 0.0
        self._idle_cpu: float | None = None
        self._idle_io: float | None = None
        self._longest_pause = 0.0
        self._told = False

    def feed(
        self,
        t: float,
        step: int | None,
        step_t: float | None,
        step_seconds: float | None,
        phase: str | None,
        cpu_seconds: float | None,
        io_bytes: float | None,
        gpu_util: float | None = None,
    ) -> Hang | HangOver | None:
        """One sample: CPU seconds and I/O bytes are running totals of the whole tree.

        Phase `done` (training over, or a notebook between two cells) is never a hang.
        """
        gap = 0.0 if self._t is None else max(0.0, t - self._t)
        self._t = t
        if gap > _LONGEST_GAP:
            self._restart_idle(cpu_seconds, io_bytes)
        else:
            self._awake += gap
        steps = step or 0
        if self._progress != (steps, step_t, phase):
            return self._note_progress((steps, step_t, phase), cpu_seconds, io_bytes)
        if not self._is_idle(cpu_seconds, io_bytes, gpu_util):
            self._restart_idle(cpu_seconds, io_bytes)
        if self._told or phase == "done":
            return None
        return self._hang(steps, step_seconds, phase, cpu_seconds)

    def _note_progress(
        self, progress: tuple[int, float | None, str | None], cpu: float | None, io: float | None
    ) -> HangOver | None:
        pause = self._awake - self._progress_at
        if self._progress is not None and self._progress[0] > 0:
            self._longest_pause = max(self._longest_pause, pause)
        over = HangOver(progress[0], pause) if self._told else None
        self._progress = progress
        self._progress_at = self._awake
        self._progress_cpu = cpu
        self._told = False
        self._restart_idle(cpu, io)
        return over

    def _restart_idle(self, cpu: float | None, io: float | None) -> None:
        self._idle_at = self._awake
        self._idle_cpu = cpu
        self._idle_io = io

    def _is_idle(self, cpu: float | None, io: float | None, gpu_util: float | None) -> bool:
        """Whether the tree has done nothing since this stretch of idleness began; unknown is not idle."""
        if cpu is None or self._idle_cpu is None or (gpu_util is not None and gpu_util > _IDLE_GPU_UTIL):
            return False
        seconds = self._awake - self._idle_at
        spent = cpu - self._idle_cpu
        if spent < 0 or spent > max(_IDLE_CPU_SECONDS, _IDLE_CPU_SHARE * seconds):
            return False  # less than before: a process of the tree ended, which is life too
        if io is None or self._idle_io is None:
            return io is None and self._idle_io is None
        return 0 <= io - self._idle_io <= _IDLE_IO_RATE * max(1.0, seconds)

    def _hang(
        self, step: int, step_seconds: float | None, phase: str | None, cpu: float | None
    ) -> Hang | None:
        age = self._awake - self._progress_at
        usual = step_seconds or 0.0
        longest = _PAUSE_FACTOR * self._longest_pause
        idle_limit = max(
            self._floored(_IDLE_FLOOR if step else _FIRST_STEP_FLOOR), _IDLE_STEPS * usual, longest
        )
        busy_limit = max(self._floored(_BUSY_FLOOR), _BUSY_STEPS * usual, longest)
        if phase in ("eval", "checkpoint"):
            busy_limit *= _MARKED_PHASE_FACTOR
        if self._awake - self._idle_at >= idle_limit:
            idle, limit = True, idle_limit
        elif step and age >= busy_limit:
            idle, limit = False, busy_limit
        else:
            return None
        self._told = True
        known = cpu is not None and self._progress_cpu is not None and cpu >= self._progress_cpu
        share = (cpu - self._progress_cpu) / age if known and age > 0 else None  # type: ignore[operator]
        return Hang(idle, age, limit, share, step, phase, step_seconds)

    def _floored(self, floor: float) -> float:
        return floor if self._floor is None else self._floor


def is_stopped(threads: object) -> bool:
    """Whether the thread states that were read show a process that is stopped: by Ctrl-Z, SIGSTOP or a debugger."""
    found = threads if isinstance(threads, list) else []
    states = [thread.get("state") for thread in found if isinstance(thread, dict)]
    return bool(states) and all(state in ("T", "t") for state in states)


def standing(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The last event of a hang that no later one calls over; None where there is none."""
    hang = None
    for event in events:
        if event.get("kind") == "hang":
            hang = event
        elif event.get("kind") == "hang-over":
            hang = None
    return hang


def is_busy(event: dict[str, object]) -> bool:
    """Whether a hang that was recorded computes: then it may be a long evaluation as well."""
    return event.get("idle") is False


def sentence(hang: Hang, stopped_pid: int | None = None) -> str:
    """The alarm as the one line that people see; `stopped_pid`: of a process that a signal has stopped.

    >>> sentence(Hang(True, 95.0, 30.0, 0.0, 1200, "train", 0.25))[:90]
    'No step for 1 min 35 s after step 1200 (usually 0.25 s): no CPU, no I/O, so it is blocked.'
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_duration

    usual = f" (usually {format_duration(hang.step_seconds)})" if hang.step and hang.step_seconds else ""
    place = f"after step {hang.step}{usual}" if hang.step else "before the first step"
    phase = f", in phase {hang.phase}" if hang.phase in ("eval", "checkpoint", "data") else ""
    if stopped_pid is not None:
        return (
            f"No step for {format_duration(round(hang.age))} {place}{phase}: it is stopped (Ctrl-Z, SIGSTOP or a "
            f"debugger). `kill -CONT {stopped_pid}` lets it go on."
        )
    if hang.idle:
        what = "no CPU, no I/O, so it is blocked"
    else:
        cpu = "n/a" if hang.cpu_share is None else f"{hang.cpu_share:.1f}"
        work = "save" if hang.phase == "checkpoint" else "evaluation"
        what = f"{cpu} cores busy: a long {work}, or an endless loop"
    return (
        f"No step for {format_duration(round(hang.age))} {place}{phase}: {what}. "
        "Stacks are in the run folder: `buoy why`. Stop it, or wait."
    )
