"""What an estimate says: the peak as an interval, its parts, who owns it, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from buoy.estimate.allocators import BY_NAME, LAST_THRESHOLD, Fits, Replay, host
from buoy.estimate.devices import Device
from buoy.estimate.trace import PARTS, Trace

# How far each engine's figure may be off: divided or multiplied by one and this. Fake tensors: the recorded traces
# agree within 0.3 % allocated and 1.6 % reserved. Small real steps: not bounded by a recording. Graphs: the order in
# which TensorFlow runs them is its own; ours was -10 to +20 % from its CPU allocator's peak on 14 models, on a GPU
# nobody measured it for us. XLA on a CPU took 0.9 to 2.9 times the uncompiled step.
DOUBT = {
    "fake": (0.005, 0.03), "real": (0.15, 0.2), "graph": (0.2, 0.2), "graph on a GPU": (0.35, 0.35), "xla": (2.0, 2.0),
}  # fmt: skip
# What TensorFlow on a CPU keeps resident: more of its regions than are in use at once, and for each operation of the
# step nodes, kernels and Python objects. Fitted on one half of the models of bench/estimate_keras.py.
TOUCHED, PER_OPERATION = 1.36, 31_600
# What a PyTorch process on a CPU keeps resident besides the bytes its tensors ask for: libraries that the first step
# loads, and their scratch; and of blocks below the size that malloc always maps alone (32 MiB) a share that lies free
# between others: at the most as much again, which nanoGPT needs after a few steps with two threads (6.4 GiB; 4.8 GiB
# with every block mapped alone). 17 small models lie inside of what 0.6 gives.
_MIB = 1 << 20
PROCESS_GROWS = (60 * _MIB, 120 * _MIB, 190 * _MIB)
LIES_FREE = (0.0, 0.35, 1.0)
# How near the bytes are found by which a verdict was decided.
_CLOSE = 0.005
# What a convolution library takes besides the tensors, as multiples of the bytes the largest convolution reads and
# writes: none, the median and the most of eight published rows. `python -m bench estimate` reports on the other rows.
CONVOLUTION = (0.0, 1.43, 3.36)
# On a CPU its copies of what it reads and writes in the order of its own kernels, channels filled up to whole vectors:
# in the same multiples 0.7 to 2.2 of six kinds of convolution, forward and backward, measured one by one.
CONVOLUTION_CPU = (0.0, 1.0, 2.2)
# A product in half precision is computed in float32 where the processor has no such units: as multiples of its two
# factors and result in float32, 0.0 to 1.2 in six shapes of a layer in bfloat16, forward and backward, one by one.
HALF_PRODUCT_CPU = (0.0, 0.6, 1.25)


@dataclass(frozen=True, slots=True)
class Interval:
    """A number and how far it may be off."""

    low: int
    likely: int
    high: int

    def plus(self, low: int, likely: int, high: int) -> Interval:
        """With something more."""
        return Interval(self.low + low, self.likely + likely, self.high + high)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one training step on one device."""

    device: Device
    trace: Trace
    allocator: str
    replay: Replay
    allocated: Interval
    """`torch.cuda.max_memory_allocated`."""
    reserved: Interval
    """`torch.cuda.max_memory_reserved`."""
    total: Interval
    """What `nvidia-smi` shows: reserved, and what CUDA keeps for itself."""
    parts: dict[str, int]
    """The peak by what it is for; besides the tensors' parts `allocator` (kept but unused) and `context`."""
    owners: tuple[tuple[str, int], ...]
    """The modules that own most of the peak, largest first."""
    margin: int
    """Bytes besides the replayed ones that a step should have to fit for sure."""
    least: int = 0
    """Bytes besides the replayed ones that it takes in any case."""

    @property
    def notes(self) -> list[str]:
        """What users must know about this estimate."""
        return self.trace.notes

    def verdict(self, memory: int | None = None) -> str:
        """`fits`, `tight` or `does not fit`, in so many bytes of device memory (the device's own by default).

        The allocator itself answers twice: with the most and with the least that CUDA and its libraries may take.
        """
        have = memory if memory is not None else self.device.memory
        if have is None:
            return "unknown"
        fits = Fits(self.trace.events, BY_NAME[self.allocator], self.replay)
        # A library that cannot have its largest workspace takes a smaller one: only the likely one must fit.
        if fits.within(have - self.device.context[1] - self.margin):
            return "fits"
        return "tight" if fits.within(have - self.device.context[0] - self.least) else "does not fit"

    def needed(self, memory: int) -> int | None:
        """The bytes by which `verdict(memory)` decided, where the peak's interval alone does not say.

        With which it surely fits; of a step that does not fit, what it takes at the least. None where the memory is
        outside of the interval.
        """
        if memory not in self.total:
            return None
        verdict = self.verdict(memory)
        extra = self.device.context[1] + self.margin
        if verdict == "does not fit":
            extra = self.device.context[0] + self.least
        fits = Fits(self.trace.events, BY_NAME[self.allocator], self.replay)
        # Between the bounds the allocator's answer is not monotone: start where it is known.
        low, high = fits.floor, self.replay.peak_reserved
        if verdict == "fits":
            high = min(high, memory - extra)
        else:
            low = max(low, memory - extra)
        while high - low > _CLOSE * high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits.within(middle) else (middle, high)
        return high + extra


def estimate(trace: Trace, device: Device, *, allocator: str | None = None) -> Estimate:
    """Replay a trace for a device."""
    graph = "operations" in trace.facts
    chosen = allocator or ("native" if device.capability else "bfc" if graph else "host")
    replay = BY_NAME[chosen].replay(trace.events)
    engine = trace.facts.get("engine", "fake")
    off_allocated, off_reserved = DOUBT[
        "graph on a GPU" if engine == "graph" and device.capability else engine
    ]
    moved = trace.facts.get("convolution", 0) if device.capability else 0
    least_conv, likely_conv, most_conv = (round(share * moved) for share in CONVOLUTION)
    # Trying algorithms takes what is free and does without what is not: it widens the peak, and never fails the step.
    most_conv = max(most_conv, trace.facts.get("convolution_tried", 0))
    recurrent = trace.facts.get("recurrent_doubt", 0)
    allocated = _around(replay.peak_allocated, off_allocated).plus(0, 0, most_conv + recurrent)
    # On a CPU a region is only address space until it is touched.
    resident = graph and not device.capability
    kept = round(TOUCHED * replay.peak_allocated) if resident else replay.peak_reserved
    around = _around(kept, off_reserved)
    if chosen == "host":
        around = _resident(trace, replay, off_reserved)
        kept = around.likely
    reserved = around.plus(least_conv, likely_conv, most_conv + recurrent)
    runtime = PER_OPERATION * trace.facts["operations"] if resident else 0
    least, most = device.context[0] + runtime, device.context[1] + runtime
    total = reserved.plus(least, (least + most) // 2, most)
    parts, owners = _at_the_peak(trace, replay)
    parts["allocator"] = kept - sum(parts.values())
    parts["workspace"] += likely_conv
    parts["context"] = (least + most) // 2
    # Where regions are only touched, what is resident beyond the replayed bytes stands next to them.
    replayed = replay.peak_allocated if resident else replay.peak_reserved
    beyond = around.low - replayed + runtime if resident or chosen == "host" else 0
    margin = around.high - replayed + runtime + likely_conv + recurrent
    return Estimate(
        device, trace, chosen, replay, allocated, reserved, total, parts, owners, margin, max(0, beyond)
    )  # fmt: skip


def _resident(trace: Trace, replay: Replay, doubt: float) -> Interval:
    """What the process grows by on a CPU: more than its tensors ask for, as malloc keeps pages of blocks given back."""
    small = [event for event in trace.events if event[0] != "a" or event[2] < LAST_THRESHOLD]
    shared, moved = host.floor(small), trace.facts.get("convolution", 0)
    half = trace.facts.get("half_product", 0)
    likely, high = (
        replay.peak_allocated + grows + round(share * shared) + round(copied * moved) + round(widened * half)
        for grows, share, copied, widened in list(
            zip(PROCESS_GROWS, LIES_FREE, CONVOLUTION_CPU, HALF_PRODUCT_CPU, strict=True)
        )[1:]
    )
    low = round(replay.peak_allocated / (1 + doubt)) + PROCESS_GROWS[0]
    return Interval(low, likely, max(high, round(likely * (1 + doubt))))


def _around(value: int, share: float) -> Interval:
    return Interval(round(value / (1 + share)), value, round(value * (1 + share)))


def _at_the_peak(trace: Trace, replay: Replay) -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
    live: dict[int, int] = {}
    for kind, identity, size in trace.events[: replay.peak_event + 1]:
        if kind == "a":
            live[identity] = size
        elif kind == "f":
            live.pop(identity, None)
    parts = dict.fromkeys(PARTS, 0)
    modules: dict[str, int] = {}
    for identity, size in live.items():
        part, module, _ = trace.label(identity)
        parts[part] = parts.get(part, 0) + size
        if module:
            modules[module] = modules.get(module, 0) + size
    ranked = sorted(modules.items(), key=lambda item: -item[1])
    return parts, tuple(ranked[:10])
