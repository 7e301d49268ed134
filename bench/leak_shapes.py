"""Memory of trainings as a sidecar would see it: leaks that end at the limit, and healthy runs that warm up.

A series is a list of `(t, step, used)` at two samples a second. All sizes are shares of a limit of 12.7 GiB, all
randomness comes from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

LIMIT = 12.7 * 2**30
RATE = 2.0

Series = list[tuple[float, int | None, float]]
Level = Callable[[float, float], float]
"""Share of the limit as a function of training seconds and steps."""


class Run:
    """One training: imports and data first, then steps of varying length, and noise on every reading."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        rng = self.random
        self.seconds = math.exp(rng.uniform(math.log(25), math.log(7200)))
        self.start = rng.uniform(0.08, 0.35)
        self.step_seconds = min(math.exp(rng.uniform(math.log(0.02), math.log(3))), self.seconds / 60)
        self.noise = rng.uniform(0.0005, 0.004)
        self.load_seconds = rng.uniform(2, 20)
        self.jitter = 0.1
        self.pause: tuple[float, float] | None = None
        self.counts_steps = True
        self.speed: Callable[[float], float] = lambda _: 1.0

    def series(self, level: Level, until: float = 1.0, longest: float | None = None) -> Series:
        """Samples until the level is reached, or for so many seconds of training."""
        rng = self.random
        samples: Series = []
        t = 0.0
        while t < self.load_seconds:
            share = self.start * t / self.load_seconds
            samples.append(
                (t, 0 if self.counts_steps else None, LIMIT * (share + abs(rng.gauss(0, self.noise))))
            )
            t += 1 / RATE
        begun, steps = t, 1.0
        end = longest if longest is not None else 4 * self.seconds
        while t - begun < end:
            share = level(t - begun, steps) + rng.gauss(0, self.noise)
            samples.append((t, int(steps) if self.counts_steps else None, LIMIT * min(share, 1.0)))
            if share >= until:
                break
            t += 1 / RATE + rng.uniform(-0.02, 0.02)
            paused = self.pause is not None and (t - begun) % self.pause[0] < self.pause[1]
            if not paused:
                pace = self.speed((t - begun) / self.seconds) * (1 + rng.gauss(0, self.jitter))
                steps += max(0.0, pace) / RATE / self.step_seconds
        return samples


def leak(kind: str, seed: int) -> Series:
    """A leak that reaches the limit after about `run.seconds`."""
    run = Run(seed)
    rng = run.random
    total = run.seconds / run.step_seconds
    start, room = run.start, 1.0 - run.start

    def linear(t: float, step: float) -> float:
        return start + room * step / total

    if kind == "linear":
        return run.series(linear)
    if kind == "after warm-up":
        warm, tau = rng.uniform(0.05, 0.2), total * rng.uniform(0.01, 0.06)
        return run.series(lambda t, n: start + warm * (1 - math.exp(-n / tau)) + (room - warm) * n / total)
    if kind == "noisy":
        run.noise = rng.uniform(0.008, 0.02)
        return run.series(linear)
    if kind == "uneven steps":
        run.jitter = rng.uniform(0.3, 0.8)
        return run.series(linear)
    if kind == "slower later":
        late = rng.uniform(0.4, 0.8)
        run.speed = lambda part: 1.0 if part < 0.25 else late
        return run.series(linear)
    if kind == "late":
        onset, level = total * rng.uniform(0.5, 3.0), rng.uniform(0.3, 0.5)
        return run.series(lambda t, n: level + max(0.0, n - onset) / total, longest=20 * run.seconds)
    if kind == "staircase":
        stairs = rng.randint(10, 30)
        return run.series(lambda t, n: start + room * math.floor(n / total * stairs) / stairs)
    if kind == "sawtooth":
        teeth, height = rng.randint(25, 120), rng.uniform(0.02, 0.1)
        return run.series(lambda t, n: linear(t, n) - height + height * (n / total * teeth % 1.0))
    if kind == "evaluation pauses":
        period = run.seconds / rng.uniform(8, 20)
        run.pause = (period, period * rng.uniform(0.1, 0.4))
        return run.series(linear)
    if kind == "irregular":
        sizes = [rng.paretovariate(2.5) for _ in range(400)]
        scale, sums = sum(sizes), [0.0]
        for size in sizes:
            sums.append(sums[-1] + size / scale)
        return run.series(lambda t, n: start + room * sums[min(400, int(n / total * 400))])
    if kind == "no steps counted":
        run.counts_steps = False
        return run.series(lambda t, n: start + room * t / run.seconds)
    raise ValueError(kind)


LEAKS = (
    "linear", "after warm-up", "noisy", "uneven steps", "slower later", "late", "staircase", "sawtooth",
    "evaluation pauses", "irregular", "no steps counted",
)  # fmt: skip


def healthy(kind: str, seed: int) -> Series:
    """A run that grows while it warms up, to between half and 92 % of the limit, and then lives on."""
    run = Run(seed)
    top = run.random.uniform(0.5, 0.92)
    if kind == "data loaded first":
        top = min(top, 0.84)
        run.start, run.load_seconds = top - 0.02, run.random.uniform(10, 300)
    return run.series(_healthy_level(kind, run, top), until=2.0, longest=run.seconds)


def _healthy_level(kind: str, run: Run, top: float) -> Level:
    rng = run.random
    total = run.seconds / run.step_seconds
    start = min(run.start, top - 0.1)
    rise = top - start
    tau = total * rng.uniform(0.02, 0.3)
    if kind == "saturating":
        return lambda t, n: start + rise * _filled(n / tau)
    if kind == "two caches":
        return lambda t, n: start + rise * (0.6 * _filled(n / tau) + 0.4 * _filled(8 * n / tau))
    if kind == "logarithmic":
        return lambda t, n: start + rise * math.log1p(10 * n / tau) / math.log1p(10 * total / tau)
    if kind == "longest batch so far":
        return _longest_batch(rng, total, start, rise)
    if kind == "first times":
        # First optimizer step, first evaluation, first checkpoint, loader workers of the second epoch.
        jumps = [(total * rng.uniform(0.0, 0.7), rng.uniform(0.3, 1.0)) for _ in range(rng.randint(2, 4))]
        whole = sum(size for _, size in jumps)
        return lambda t, n: start + rise * sum(size for place, size in jumps if n >= place) / whole
    if kind == "data loaded first":
        return lambda t, n: top - 0.02 * (1 - _filled(n / tau))
    if kind == "collected garbage":
        height, warm = rng.uniform(0.02, 0.1), min(tau, total / 10)
        period = max(3.0, rng.uniform(0.002, 0.01) * run.seconds)
        return lambda t, n: start + (rise - height) * _filled(n / warm) + height * (t / period % 1.0)
    if kind == "slow drift":
        # Fragmentation: a fast warm-up and then a creep that never gets far.
        creep = rng.uniform(0.01, 0.04)
        return lambda t, n: start + (rise - creep) * _filled(6 * n / tau) + creep * math.sqrt(n / total)
    if kind == "saves":
        # A copy of the state while saving: spikes on a flat floor after a short warm-up.
        period, height = run.seconds / rng.uniform(6, 20), rng.uniform(0.05, 0.2)
        base = max(0.1, top - height)
        return lambda t, n: (
            base * (0.7 + 0.3 * _filled(6 * n / tau))
            + (height if t > period and t % period < 0.1 * period else 0.0)
        )
    if kind == "late evaluation":
        # A second warm-up long after the first: evaluation fills its own caches.
        onset, part = total * rng.uniform(0.2, 0.5), rng.uniform(0.3, 0.6)
        return lambda t, n: (
            start + rise * ((1 - part) * _filled(6 * n / tau) + part * _filled(max(0.0, n - onset) / tau))
        )
    raise ValueError(kind)


def _filled(times: float) -> float:
    """How full a cache is that was filled at random for so many times its own time."""
    return 1 - math.exp(-times)


def _longest_batch(rng: random.Random, total: float, start: float, rise: float) -> Level:
    """The allocator keeps what the longest batch needed: records get rarer as training goes on."""
    shape = rng.uniform(3, 12)
    record = seen = 0.0

    def level(t: float, n: float) -> float:
        nonlocal record, seen
        while seen < n:
            record = max(record, rng.betavariate(2, shape) * 1.3)
            seen += max(1.0, total / 4000)
        return start + rise * min(1.0, record)

    return level


HEALTHY = (
    "saturating", "two caches", "logarithmic", "longest batch so far", "first times", "data loaded first",
    "collected garbage", "slow drift", "saves", "late evaluation",
)  # fmt: skip


def undecidable(kind: str, seed: int) -> Series:
    """Growth in a straight line that stops by itself: up to that point nobody can tell it from a leak."""
    run = Run(seed)
    rng = run.random
    total = run.seconds / run.step_seconds
    top = rng.uniform(0.5, 0.92)
    start = min(run.start, top - 0.1)
    filled = total * rng.uniform(0.1, 0.6)
    if kind == "cache of the first epoch":
        return run.series(
            lambda t, n: start + (top - start) * min(1.0, n / filled), until=2.0, longest=run.seconds
        )
    if kind == "emptied every epoch":
        return run.series(
            lambda t, n: start + (top - start) * (n / filled % 1.0), until=2.0, longest=run.seconds
        )
    if kind == "data fills 86-95 % before the first step":
        top = rng.uniform(0.86, 0.95)
        run.start, run.load_seconds = top, rng.uniform(10, 300)
        return run.series(lambda t, n: top, until=2.0, longest=run.seconds)
    raise ValueError(kind)


UNDECIDABLE = ("cache of the first epoch", "emptied every epoch", "data fills 86-95 % before the first step")
