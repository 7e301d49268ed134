"""Why is the training slow? Thrashing, a bottleneck, or a slow-down whose cause is said to be unknown.

Readings are summed over ticks of twenty seconds. Only time in which it trains counts: evaluation and saving
are left out. The pace is compared with the median of this run's own healthy ticks, the faults with their own.
A bottleneck is judged on the last three ticks: about a minute. Each finding is reported once, when its state
begins; the state ends well below the value at which it began, so that a value near the line is not reported
again and again.

Thrashing rests on the run's own major faults, by the step: a run that always faults is compared with itself, however
much slower it has become. Where the kernel counts refaults (pages that were thrown out before), most of the faults must
be such: a step that reads more of a mapped file for the first time is not short of memory. System-wide pressure missed
a 66-fold slow-down, so `memory_stall` and `io_stall` must be the training's own cgroup (v2); leave them None elsewhere.

A slow-down of a minute is looked into: two looks at the threads show how long they were ready without a CPU.

Steps that take longer and as much more CPU time do more work: a larger batch, another model. That is no slow-down, and
becomes the pace to compare with.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from buoy.machine.threads import Look

_TICK = 20.0
_TICKS_JUDGED = 3
_BASELINE_TICKS = 32
_FEWEST_BASELINE_TICKS = 3
_LONGEST_GAP = 5.0

_THRASHING_INFLATION = 3.0
_THRASHING_FAULTS = 10.0
"""Times the usual number of major faults of a step."""
_FEWEST_FAULTS = 20.0
"""Major faults a second that no healthy step needs."""
_REFAULTS = 0.3
"""Pages that are read back, for each major fault: from here on they are what it faults for."""
_SLOW_INFLATION = 2.0
_CROWDED = 0.3
"""The share of the time that a thread is ready without a CPU from which on that is why it is slow."""
_MORE_WORK = 0.7
"""CPU time of a step that has grown by at least this part of what its duration has: it has more to do."""

_SHARES = {"data": 0.40, "io": 0.40, "steal": 0.15, "throttled": 0.25}
"""Bottlenecks, and the share of time from which each is told."""
_GPU_IDLE = 30.0
_LEAVE = 0.7
"""A state ends at this part of the value at which it began."""

_TOTALS = ("data", "io", "memory", "steal", "throttled", "faults", "refaults", "cpu")


class Finding:
    """One reason for slowness that has just begun to hold."""

    __slots__ = (
        "alarm",
        "faults_per_second",
        "gpu_util",
        "kind",
        "share",
        "step_seconds",
        "usual_step_seconds",
    )

    def __init__(
        self,
        kind: str,
        share: float | None = None,
        step_seconds: float | None = None,
        usual_step_seconds: float | None = None,
        faults_per_second: float | None = None,
        gpu_util: float | None = None,
    ) -> None:
        self.kind = kind
        """`thrashing`, `crowded`, `slow`, `data`, `gpu-idle`, `io`, `steal` or `throttled`."""
        self.alarm = "thrashing" if kind == "thrashing" else "bottleneck"
        """The alarm's name in the event log."""
        self.share = share
        """Of the training's time, 0 to 1."""
        self.step_seconds = step_seconds
        self.usual_step_seconds = usual_step_seconds
        self.faults_per_second = faults_per_second
        self.gpu_util = gpu_util

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


class _Tick:
    """What happened in some twenty seconds of training; a total is None when it was never readable."""

    __slots__ = ("gpu_samples", "gpu_sum", "seconds", "steps", "totals")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.totals: dict[str, float] = {}
        self.gpu_sum = 0.0
        self.gpu_samples = 0

    def rate(self, name: str) -> float | None:
        total = self.totals.get(name)
        return None if total is None or self.seconds <= 0 else total / self.seconds

    def each(self, name: str) -> float | None:
        """Per step; per tick as long as no step has ended in it."""
        total = self.totals.get(name)
        return None if total is None else total / max(1, self.steps)


class SlowdownWatch:
    """Watches one training, fed about once a second. `cores` is what the training may use (for CPU steal).

    `look` reads what its threads do; it is called twice in a slow-down.
    """

    def __init__(self, cores: float = 1.0, look: Callable[[], Look | None] | None = None) -> None:
        self._cores = max(1.0, cores)
        self._look = look or (lambda: None)
        self._seen: Look | None = None
        self._t: float | None = None
        self._step = 0
        self._totals: dict[str, float | None] = {}
        self._tick = _Tick()
        self._recent: list[_Tick] = []
        self._since_step = 0.0
        self._paces: list[float] = []
        self._faults: list[float] = []
        self._cpu: list[float] = []
        self._states: set[str] = set()

    def feed(
        self,
        t: float,
        step: int | None,
        phase: str | None,
        *,
        data_wait: float | None = None,
        major_faults: float | None = None,
        steal: float | None = None,
        throttled: float | None = None,
        io_stall: float | None = None,
        memory_stall: float | None = None,
        gpu_util: float | None = None,
        refaults: float | None = None,
        cpu_seconds: float | None = None,
    ) -> list[Finding]:
        """One sample; the new findings, usually none.

        All but `gpu_util` (percent) are running totals: seconds, and counts for `major_faults` and `refaults`. `steal`
        is summed over all cores.
        """
        steps = step or 0
        totals = {
            "data": data_wait, "io": io_stall, "memory": memory_stall,
            "steal": steal, "throttled": throttled, "faults": major_faults, "refaults": refaults, "cpu": cpu_seconds,
        }  # fmt: skip
        before, self._totals = self._totals, totals
        gap = 0.0 if self._t is None else t - self._t
        done = steps - self._step
        self._t, self._step = t, steps
        training = steps > 0 and phase in ("train", "data", None)
        if not training or not 0 < gap <= _LONGEST_GAP or done < 0:
            self._since_step = 0.0
            return []
        self._add(gap, done, before, totals, gpu_util)
        if self._tick.seconds < _TICK:
            return []
        tick, self._tick = self._tick, _Tick()
        self._recent = [*self._recent[1 - _TICKS_JUDGED :], tick]
        return self._judge(tick)

    def _add(
        self,
        gap: float,
        done: int,
        before: dict[str, float | None],
        totals: dict[str, float | None],
        gpu_util: float | None,
    ) -> None:
        tick = self._tick
        tick.seconds += gap
        tick.steps += done
        self._since_step = 0.0 if done else self._since_step + gap
        for name in _TOTALS:
            now, then = totals[name], before.get(name)
            if now is not None and then is not None:
                tick.totals[name] = tick.totals.get(name, 0.0) + max(0.0, now - then)
        if gpu_util is not None:
            tick.gpu_sum += gpu_util
            tick.gpu_samples += 1

    def _judge(self, tick: _Tick) -> list[Finding]:
        findings = self._pace(tick)
        if len(self._recent) == _TICKS_JUDGED:
            findings += self._bottlenecks()
        return findings

    def _pace(self, tick: _Tick) -> list[Finding]:
        """Thrashing or a plain slow-down, and what the run's healthy pace is."""
        # Thrashing may stretch a step over ticks: one that has not ended has lasted since the one before.
        pace = tick.seconds / tick.steps if tick.steps else max(tick.seconds, self._since_step)
        if len(self._paces) < _FEWEST_BASELINE_TICKS:
            self._remember(pace, tick)
            return []
        usual = _median(self._paces)
        inflation = pace / usual
        lasts = all(_tick_pace(seen) >= _SLOW_INFLATION * usual for seen in self._recent)
        lasts = lasts and len(self._recent) == _TICKS_JUDGED
        short_of_memory = self._is_short_of_memory(tick)
        thrashing = short_of_memory and (lasts or inflation >= _THRASHING_INFLATION)
        if lasts and not thrashing and self._is_more_work(tick, inflation):
            self._paces, self._faults, self._cpu = [pace], [], []
            return []
        slow = lasts and not thrashing and "thrashing" not in self._states
        delayed = self._delayed(inflation)
        found = []
        values = {
            "step_seconds": pace, "usual_step_seconds": usual, "faults_per_second": tick.rate("faults"),
        }  # fmt: skip
        if self._enter("thrashing", thrashing, short_of_memory and inflation >= _LEAVE * _SLOW_INFLATION):
            found.append(Finding("thrashing", share=tick.rate("memory"), **values))
        if self._enter("slow", slow, inflation >= _LEAVE * _SLOW_INFLATION):
            is_crowded = delayed is not None and delayed >= _CROWDED
            found.append(Finding("crowded" if is_crowded else "slow", share=delayed, **values))
        if inflation < _SLOW_INFLATION and "thrashing" not in self._states:
            self._remember(pace, tick)
        return found

    def _delayed(self, inflation: float) -> float | None:
        """How long its threads were ready without a CPU, as a share of the time since it became slow."""
        if inflation < _SLOW_INFLATION or self._seen is None:
            self._seen = self._look() if inflation >= _SLOW_INFLATION else None
            return None
        now = self._look()
        if now is None:
            return None
        from buoy.machine.threads import Activity  # as in `stall`

        return Activity(self._seen, now).delayed

    def _is_short_of_memory(self, tick: _Tick) -> bool:
        """Whether pages are read back all the time, or the whole group stalls for memory."""
        if (tick.rate("memory") or 0.0) >= 0.2:
            return True
        faults, refaults, each = tick.rate("faults"), tick.rate("refaults"), tick.each("faults")
        if faults is None or each is None or faults < _FEWEST_FAULTS:
            return False
        usual = _median(self._faults) if self._faults else 0.0
        return each >= _THRASHING_FAULTS * usual and (refaults is None or refaults >= _REFAULTS * faults)

    def _is_more_work(self, tick: _Tick, inflation: float) -> bool:
        """Never said of a GPU's training: the CPU time with which it waits for the GPU is no work."""
        cpu = tick.each("cpu")
        if cpu is None or not self._cpu or tick.gpu_samples:
            return False
        return cpu >= _MORE_WORK * inflation * _median(self._cpu)

    def _remember(self, pace: float, tick: _Tick) -> None:
        self._paces = [*self._paces[1 - _BASELINE_TICKS :], pace]
        faults, cpu = tick.each("faults"), tick.each("cpu")
        if faults is not None:
            self._faults = [*self._faults[1 - _BASELINE_TICKS :], faults]
        if cpu is not None:
            self._cpu = [*self._cpu[1 - _BASELINE_TICKS :], cpu]

    def _bottlenecks(self) -> list[Finding]:
        found = []
        seconds = sum(tick.seconds for tick in self._recent)
        samples = sum(tick.gpu_samples for tick in self._recent)
        gpu_util = sum(tick.gpu_sum for tick in self._recent) / samples if samples else None
        for kind, line in _SHARES.items():
            known = [tick.totals[kind] for tick in self._recent if kind in tick.totals]
            if len(known) < _TICKS_JUDGED:
                continue
            share = sum(known) / seconds / (self._cores if kind == "steal" else 1.0)
            if self._enter(kind, share >= line, share >= _LEAVE * line):
                idle = kind == "data" and gpu_util is not None and gpu_util < _GPU_IDLE
                found.append(Finding("gpu-idle" if idle else kind, share=min(1.0, share), gpu_util=gpu_util))
        return found

    def _enter(self, kind: str, holds: bool, still_holds: bool) -> bool:
        """Whether this state has just begun."""
        if kind in self._states:
            if not still_holds:
                self._states.discard(kind)
            return False
        if holds:
            self._states.add(kind)
        return holds


_WHAT = {
    "data": "is spent waiting for data",
    "io": "is spent blocked on I/O",
    "steal": "other machines on this host take the CPU",
    "throttled": "the CPU quota throttles the training",
}
_ADVICE = {
    "thrashing": "Use less RAM: fewer workers, smaller batches.",
    "slow": "Look at other processes, I/O and the clock rate.",
    "crowded": "End other programs, or use fewer threads and workers.",
    "data": "Use more loader workers, or prepare the data beforehand.",
    "io": "Copy the data to a local disk, or read larger files.",
    "steal": "Start another session, or expect it to be slow.",
    "throttled": "Use fewer threads and workers, or a larger quota.",
}


def sentence(finding: Finding) -> str:
    """The finding as the one line that users see.

    >>> print(sentence(Finding("data", share=0.62)))
    62 % of the time is spent waiting for data. Use more loader workers, or prepare the data beforehand.
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_duration

    if finding.kind in ("thrashing", "crowded", "slow"):
        now, usual = format_duration(finding.step_seconds), format_duration(finding.usual_step_seconds)
        times = (finding.step_seconds or 0.0) / (finding.usual_step_seconds or 1.0)
        pace = f"Steps take {now}, {times:.1f} times the usual {usual}"
        if finding.kind == "slow":
            return f"{pace}; the cause is not known. {_ADVICE['slow']}"
        if finding.kind == "crowded":
            wait = f"it waits for a CPU {100 * (finding.share or 0.0):.0f} % of the time"
            return f"{pace}: {wait}. {_ADVICE['crowded']}"
        faults = "n/a" if finding.faults_per_second is None else f"{finding.faults_per_second:.0f}"
        return f"{pace}, with {faults} major faults per second: memory is thrashing. {_ADVICE['thrashing']}"
    share = "n/a" if finding.share is None else f"{100 * finding.share:.0f} %"
    if finding.kind == "gpu-idle":
        busy = "n/a" if finding.gpu_util is None else f"{finding.gpu_util:.0f} %"
        return f"The GPU is {busy} busy: {share} of the time {_WHAT['data']}. {_ADVICE['data']}"
    return f"{share} of the time {_WHAT[finding.kind]}. {_ADVICE[finding.kind]}"


def _tick_pace(tick: _Tick) -> float:
    return tick.seconds / max(1, tick.steps)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
