"""Why is the training slow? Thrashing, a bottleneck, or a slow-down whose cause is said to be unknown.

Readings are summed over ticks of twenty seconds. Only time in which it trains counts: evaluation and saving
are left out. The pace is compared with the median of this run's own healthy ticks, the faults with their own.
A bottleneck is judged on the last three ticks: about a minute. Each finding is told once, when its state
begins; the state ends well below the value at which it began, so that a value near the line is not told
again and again.

Thrashing rests on the run's own major faults: system-wide pressure missed a 66-fold slow-down. `memory_stall`
and `io_stall` must therefore be the training's own cgroup (v2); leave them None elsewhere.
"""

from __future__ import annotations

_TICK = 20.0
_TICKS_JUDGED = 3
_BASELINE_TICKS = 32
_FEWEST_BASELINE_TICKS = 3
_LONGEST_GAP = 5.0

_THRASHING_INFLATION = 3.0
_THRASHING_FAULTS = 10.0
"""Times the usual rate of major faults."""
_FEWEST_FAULTS = 20.0
"""Major faults a second that no healthy step needs."""
_SLOW_INFLATION = 2.0

_SHARES = {"data": 0.40, "io": 0.40, "steal": 0.15, "throttled": 0.25}
"""Bottlenecks, and the share of time from which each is told."""
_GPU_IDLE = 30.0
_LEAVE = 0.7
"""A state ends at this part of the value at which it began."""

_TOTALS = ("data", "io", "memory", "steal", "throttled", "faults")


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
        """`thrashing`, `slow`, `data`, `gpu-idle`, `io`, `steal` or `throttled`."""
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


class SlowdownWatch:
    """Watches one training, fed about once a second. `cores` is what the training may use (for CPU steal)."""

    def __init__(self, cores: float = 1.0) -> None:
        self._cores = max(1.0, cores)
        self._t: float | None = None
        self._step = 0
        self._totals: dict[str, float | None] = {}
        self._tick = _Tick()
        self._recent: list[_Tick] = []
        self._since_step = 0.0
        self._paces: list[float] = []
        self._fault_rates: list[float] = []
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
    ) -> list[Finding]:
        """One sample; the new findings, usually none.

        All but `gpu_util` (percent) are running totals: seconds, and a count for `major_faults`. `steal` is
        summed over all cores.
        """
        steps = step or 0
        totals = {
            "data": data_wait, "io": io_stall, "memory": memory_stall,
            "steal": steal, "throttled": throttled, "faults": major_faults,
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
        faults = tick.rate("faults")
        if len(self._paces) < _FEWEST_BASELINE_TICKS:
            self._remember(pace, faults)
            return []
        usual = _median(self._paces)
        usual_faults = _median(self._fault_rates) if self._fault_rates else 0.0
        inflation = pace / usual
        values = {"step_seconds": pace, "usual_step_seconds": usual, "faults_per_second": faults}
        faulting = faults is not None and faults >= max(_FEWEST_FAULTS, _THRASHING_FAULTS * usual_faults)
        stalled = (tick.rate("memory") or 0.0) >= 0.2
        slow_ticks = [seen for seen in self._recent if _tick_pace(seen) >= _SLOW_INFLATION * usual]
        thrashing = inflation >= _THRASHING_INFLATION and (faulting or stalled)
        still_thrashing = inflation >= _LEAVE * _THRASHING_INFLATION and (faulting or stalled)
        slow = len(slow_ticks) == _TICKS_JUDGED and not thrashing and "thrashing" not in self._states
        found = []
        if self._enter("thrashing", thrashing, still_thrashing):
            found.append(Finding("thrashing", share=tick.rate("memory"), **values))
        if self._enter("slow", slow, inflation >= _LEAVE * _SLOW_INFLATION):
            found.append(Finding("slow", **values))
        if inflation < _SLOW_INFLATION and "thrashing" not in self._states:
            self._remember(pace, faults)
        return found

    def _remember(self, pace: float, faults: float | None) -> None:
        self._paces = [*self._paces[1 - _BASELINE_TICKS :], pace]
        if faults is not None:
            self._fault_rates = [*self._fault_rates[1 - _BASELINE_TICKS :], faults]

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
    "data": "goes into waiting for data",
    "io": "is spent blocked on I/O",
    "steal": "other machines on this host take the CPU",
    "throttled": "the CPU quota holds the training back",
}
_ADVICE = {
    "thrashing": "Use less RAM: fewer workers, smaller batches.",
    "slow": "Look at other processes, I/O and the clock rate.",
    "data": "Use more loader workers, or prepare the data beforehand.",
    "io": "Copy the data to a local disk, or read larger files.",
    "steal": "Start another session, or expect it to be slow.",
    "throttled": "Use fewer threads and workers, or a larger quota.",
}


def sentence(finding: Finding) -> str:
    """The finding as the one line that people see.

    >>> print(sentence(Finding("data", share=0.62)))
    62 % of the time goes into waiting for data. Use more loader workers, or prepare the data beforehand.
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_duration

    if finding.kind in ("thrashing", "slow"):
        now, usual = format_duration(finding.step_seconds), format_duration(finding.usual_step_seconds)
        times = (finding.step_seconds or 0.0) / (finding.usual_step_seconds or 1.0)
        pace = f"Steps take {now}, {times:.1f} times the usual {usual}"
        if finding.kind == "slow":
            return f"{pace}; the cause is not known. {_ADVICE['slow']}"
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
