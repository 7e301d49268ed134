"""Why does no step come? Suspected from the age of the last sign of progress; said from what the threads do.

No CPU and no I/O to speak of is only a suspicion, raised soon; a busy CPU (an evaluation that nobody marked, or an
endless loop) is one raised late, and later still in a marked evaluation or save. Then the threads are looked at, twice
(see machine/threads.py), and their states say which it is:

- **blocked**: the main thread has not run at all and waits with no time limit. Certain only where every thread of the
  tree waits for another one of it: that cannot end.
- **starved**: it is ready to run and gets hardly any CPU. Certain only while it surely got less than any step took: an
  endless loop on a crowded machine looks the same after that.
- **network**, **disk**, **sleep**: it waits for what will come: bytes that arrive, a file that is written, a time.
- **waiting**: it wakes up now and then, only to wait again.
- **busy** and **stopped** (by a signal).

Every limit has a floor in seconds and grows with what this run has shown: the time a step takes, and the longest pause
it has come out of by itself. Time in which the watcher was not running (a suspended machine) does not count. Before the
first step (of a script, of a notebook's cell, after a training that is over) nobody knows what is slow: there only what
is certain, and starvation, is worth a line.
"""

from __future__ import annotations

from math import inf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from buoy.machine.threads import Activity, Look

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
_SHORTEST_LOOK = 0.9
"""Seconds between two looks at the threads."""
_STARVED_DELAY = 0.5
"""The share of the time that a thread is ready without a CPU from which on, with hardly any CPU used, it is starved."""
_STARVED_CORES = 0.15
_CPU_TICKS = 0.03
"""CPU seconds by which a difference of two readings of /proc may be too low."""
_BUSY_CORES = 0.1
_MOST_THREADS = 64

IN_GOOD_TIME = ("network", "disk", "sleep")
"""What it waits for comes, or may: said only after as long as a busy one."""


class Hang:
    """A stall worth an event, and mostly a line."""

    __slots__ = (
        "age", "cpu_share", "delayed", "is_certain", "is_quiet", "network", "phase", "state", "step", "step_seconds",
        "threads",
        "threshold", "waits",
    )  # fmt: skip

    def __init__(
        self,
        state: str,
        age: float,
        threshold: float,
        cpu_share: float | None,
        step: int,
        phase: str | None,
        step_seconds: float | None,
        activity: Activity | None = None,
        had_cpu: bool = False,
    ) -> None:
        """`had_cpu`: it may have got the CPU time that a step takes since the last one."""
        self.state = state
        """`blocked`, `starved`, `network`, `disk`, `sleep`, `waiting`, `busy` or `stopped`."""
        self.age = age
        """Seconds since the last sign of progress."""
        self.threshold = threshold
        self.cpu_share = cpu_share
        """Of one core, since that sign; None when not known."""
        self.step = step
        self.phase = phase
        self.step_seconds = step_seconds
        self.is_certain = activity is not None and _is_proven(state, activity, had_cpu)
        """Whether the threads prove the state."""
        wait = activity.wait if activity is not None else None
        if activity is not None and state == "disk":
            wait = activity.file_wait or wait
        self.waits = wait.what if wait is not None else None
        """What the main thread does, or the one that waits for a disk, after "it"; None when it runs, or not known."""
        self.delayed = activity.delayed if activity is not None else None
        """The share of the time that a thread was ready to run and not on a CPU."""
        self.network = activity.transferred if activity is not None else None
        """Bytes a second that came and went over the network."""
        self.is_quiet = not self.has_begun and not (self.is_certain and state not in IN_GOOD_TIME)
        """Whether it is only recorded: before the first step nobody knows how long things take."""
        self.threads = (
            [thread.values() for thread in activity.threads[:_MOST_THREADS]] if activity is not None else []
        )

    @property
    def has_begun(self) -> bool:
        """Whether a training is known to be under way."""
        return _has_begun(self.step, self.phase)

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {slot: getattr(self, slot) for slot in self.__slots__ if slot != "threads"}


class HangOver:
    """Progress came again after a hang that was recorded."""

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

    `floor_seconds` (BUOY_HANG_SECONDS) replaces the floor of idleness, and the others in proportion. `look` reads what
    the threads do; it is called twice in a stall, and then as often as the limit says.
    """

    def __init__(
        self, floor_seconds: float | None = None, look: Callable[[], Look | None] | None = None
    ) -> None:
        self._scale = 1.0 if floor_seconds is None else floor_seconds / _IDLE_FLOOR
        self._look = look or (lambda: None)
        self._t: float | None = None
        self._awake = 0.0  # seconds watched, without gaps: the clock of everything below
        self._progress: tuple[object, ...] | None = None
        self._progress_at = 0.0
        self._progress_cpu: float | None = None
        self._step_cpu = inf  # the least CPU seconds that a step of this training took
        self._unclear_cpu = inf  # CPU seconds of the last samples with progress that may have come after it
        self._idle_at = 0.0
        self._idle_cpu: float | None = None
        self._idle_io: float | None = None
        self._longest_pause = 0.0
        self._seen: Look | None = None
        self._seen_at = -inf
        self._told: tuple[str, bool] | None = None
        self._again_at = 0.0

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
        data_wait: float | None = None,
    ) -> Hang | HangOver | None:
        """One sample: CPU seconds, I/O bytes (of the whole tree) and seconds spent waiting for data are running totals.

        Phase `done` (a notebook between two cells, a script at its end) is never a hang.
        """
        gap = 0.0 if self._t is None else max(0.0, t - self._t)
        self._t = t
        if gap > _LONGEST_GAP:
            self._restart_idle(cpu_seconds, io_bytes)
        else:
            self._awake += gap
        steps = step or 0
        # A batch that was handed out is progress, too: so an evaluation shows that it goes on.
        progress = (steps, step_t, phase, data_wait)
        if self._progress != progress:
            return self._note_progress(progress, steps, cpu_seconds, io_bytes)
        if not self._is_idle(cpu_seconds, io_bytes, gpu_util):
            self._restart_idle(cpu_seconds, io_bytes)
        if phase == "done":
            return None
        return self._hang(steps, step_seconds, phase, cpu_seconds, io_bytes)

    def _note_progress(
        self, progress: tuple[object, ...], steps: int, cpu: float | None, io: float | None
    ) -> HangOver | None:
        pause = self._awake - self._progress_at
        if self._progress is not None and self._progress[0] and self._progress[2] not in ("start", "done"):
            self._longest_pause = max(self._longest_pause, pause)  # not the night between two cells
        over = HangOver(steps, pause) if self._told is not None else None
        before = self._progress[0] if self._progress is not None else 0
        self._unclear_cpu = inf
        if isinstance(before, int) and cpu is not None and self._progress_cpu is not None:
            spent, made = cpu - self._progress_cpu, steps - before
            if before > 0 and made > 0:
                self._step_cpu = min(self._step_cpu, spent / made)
            least = made * self._step_cpu if made > 0 else 0.0
            self._unclear_cpu = max(0.0, spent - least)
        self._progress = progress
        self._progress_at = self._awake
        self._progress_cpu = cpu
        self._told, self._again_at, self._seen_at = None, 0.0, -inf
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
        self, step: int, step_seconds: float | None, phase: str | None, cpu: float | None, io: float | None
    ) -> Hang | None:
        has_begun = _has_begun(step, phase)
        idle_limit, busy_limit = self._limits(has_begun, step_seconds, phase)
        idle, age = self._awake - self._idle_at, self._awake - self._progress_at
        may_be_idle = idle >= 0.5 * idle_limit
        may_be_busy = has_begun and age >= 0.5 * busy_limit
        if self._awake < self._again_at or not (may_be_idle or may_be_busy):
            return None
        if self._seen_at < (self._idle_at if may_be_idle else self._progress_at):
            self._seen, self._seen_at = self._look(), self._awake  # the first of two looks
            return None
        is_idle, is_busy = idle >= idle_limit, has_begun and age >= busy_limit
        if not (is_idle or is_busy) or self._awake - self._seen_at < _SHORTEST_LOOK:
            return None
        activity = self._activity()
        state = _state(activity, is_idle)
        if state in IN_GOOD_TIME and has_begun and not is_busy:
            self._restart_idle(cpu, io)
            return None
        limit = idle_limit if is_idle else busy_limit
        # It may become something else. The next look starts over: the stacks that are asked for now wake a thread.
        self._again_at, self._seen_at = self._awake + limit, -inf
        had_cpu = has_begun and self._may_have_had_cpu(cpu)
        share = self._cpu_share(cpu, age)
        hang = Hang(state, age, limit, share, step, phase, step_seconds, activity, had_cpu)
        known, self._told = self._told, (hang.state, hang.is_certain)
        return hang if known != self._told else None

    def _limits(self, has_begun: bool, step_seconds: float | None, phase: str | None) -> tuple[float, float]:
        usual = step_seconds or 0.0
        longest = _PAUSE_FACTOR * self._longest_pause
        idle_floor = self._scale * (_IDLE_FLOOR if has_begun else _FIRST_STEP_FLOOR)
        busy = max(self._scale * _BUSY_FLOOR, _BUSY_STEPS * usual, longest)
        if phase in ("eval", "checkpoint"):
            busy *= _MARKED_PHASE_FACTOR
        return max(idle_floor, _IDLE_STEPS * usual, longest), busy

    def _activity(self) -> Activity | None:
        """What the threads did since the last look; None when they cannot be read."""
        before, self._seen, self._seen_at = self._seen, self._look(), self._awake
        if before is None or self._seen is None:
            return None
        from buoy.machine.threads import Activity  # only in a stall: the sidecar is to stay small

        return Activity(before, self._seen)

    def _may_have_had_cpu(self, cpu: float | None) -> bool:
        """Whether it may have got the CPU time of a step since the last one: of the cheapest, by a coarse reading."""
        if cpu is None or self._progress_cpu is None or self._step_cpu == inf:
            return True
        return self._unclear_cpu + cpu - self._progress_cpu + _CPU_TICKS > self._step_cpu

    def _cpu_share(self, cpu: float | None, age: float) -> float | None:
        """Of one core, since the last sign of progress."""
        if cpu is None or self._progress_cpu is None or cpu < self._progress_cpu or age <= 0:
            return None
        return (cpu - self._progress_cpu) / age


def _has_begun(step: int, phase: str | None) -> bool:
    return step > 0 and phase != "start"


def _state(activity: Activity | None, is_idle: bool) -> str:
    """Which stall it is; `is_idle`: by the CPU time and the I/O that were sampled."""
    if activity is None:
        return "waiting" if is_idle else "busy"
    if activity.is_stopped:
        return "stopped"
    if (activity.delayed or 0.0) >= _STARVED_DELAY and activity.cores < _STARVED_CORES:
        return "starved"
    if not is_idle and activity.cores >= _BUSY_CORES:
        return "busy"
    if (activity.transferred or 0.0) >= _IDLE_IO_RATE:
        return "network"
    if (activity.moved or 0.0) >= _IDLE_IO_RATE or activity.file_wait is not None:
        return "disk"
    wait = activity.wait
    if not is_idle:
        return "busy"
    if wait is not None and wait.kind == "sleep":
        return "sleep"
    # A child may have much to do before it ends, and nothing of it is seen here.
    is_blocked = wait is not None and activity.main_is_still and not wait.ends_by_itself
    return "blocked" if activity.is_closed or (is_blocked and wait.kind != "child") else "waiting"  # type: ignore[union-attr]


def _is_proven(state: str, activity: Activity, had_cpu: bool) -> bool:
    """Whether the threads leave no other reading: what another thread does is not yet what the main one waits for."""
    if state == "starved":
        return (activity.main_delayed or 0.0) >= _STARVED_DELAY and not had_cpu
    if state == "network":
        return activity.wait is not None and activity.wait.kind == "network"
    return state == "stopped" or (state == "blocked" and activity.is_closed)


def standing(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The last event of a hang that no later one calls over; None where there is none."""
    hang = None
    for event in events:
        if event.get("kind") == "hang":
            hang = event
        elif event.get("kind") == "hang-over":
            hang = None
    return hang


def state_of(event: dict[str, Any]) -> str:
    """The state of a hang that was recorded, also by an older buoy."""
    state = event.get("state")
    if isinstance(state, str):
        return state
    threads = event.get("threads")
    states = (
        [thread.get("state") for thread in threads if isinstance(thread, dict)]
        if isinstance(threads, list)
        else []
    )
    if states and all(state in ("T", "t") for state in states):
        return "stopped"
    return "busy" if event.get("idle") is False else "blocked"


def wants_stacks(event: dict[str, Any]) -> bool:
    """Whether to ask for its stacks. That takes a signal, which cuts a write to a pipe or a socket short.

    So what writes, or only waits for its time, is left in peace.
    """
    return event.get("is_quiet") is not True and event.get("state") in ("blocked", "waiting", "busy")


_ADVICE = {
    "starved": "Close other programs, or get a larger CPU quota.",
    "network": "Wait, or use a nearer copy of the data.",
    "disk": "Wait, or use a local disk.",
}
_USUAL_ADVICE = "`buoy why` has the stacks: stop it, or wait."


def sentence(hang: Hang, pid: int | None = None) -> str:
    """The alarm as the one line that users see; `pid`: of the process, for the command that wakes a stopped one.

    >>> print(sentence(Hang("busy", 95.0, 30.0, 1.0, 1200, "train", 0.25))[:95])
    No step for 1 min 35 s after step 1200 (usually 0.25 s): 1.0 cores busy: a long evaluation, or
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_duration

    usual = f" (usually {format_duration(hang.step_seconds)})" if hang.has_begun and hang.step_seconds else ""
    place = f"after step {hang.step}{usual}" if hang.step else "before the first step"
    phase = f", in phase {hang.phase}" if hang.phase in ("eval", "checkpoint", "data") else ""
    advice = _ADVICE.get(hang.state, _USUAL_ADVICE)
    if hang.state == "stopped":
        advice = f"`kill -CONT {pid}` lets it continue."
    return f"No step for {format_duration(round(hang.age))} {place}{phase}: {_what(hang)}. {advice}"


def _what(hang: Hang) -> str:
    from buoy.units import format_bytes

    if hang.state == "stopped":
        return "it is stopped (Ctrl-Z, SIGSTOP or a debugger)"
    if hang.state == "starved":
        return (
            f"starved of CPU: ready to run, and without a CPU {100 * (hang.delayed or 0.0):.0f} % of the time"
        )
    if hang.state == "network":
        return f"it waits for the network ({format_bytes(hang.network)} come and go each second)"
    if hang.state == "blocked" and hang.is_certain:
        return "deadlocked: no thread of it can run again"
    if hang.state == "busy":
        cpu = "n/a" if hang.cpu_share is None else f"{hang.cpu_share:.1f}"
        work = "save" if hang.phase == "checkpoint" else "evaluation"
        return f"{cpu} cores busy: a long {work}, or an endless loop"
    waits = f"it {(hang.waits or 'waits')[:50]}"
    return {
        "blocked": f"blocked: {waits}",
        "waiting": f"{waits}, over and over",
    }.get(hang.state, waits)
