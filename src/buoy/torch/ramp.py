"""Measures the parts of a ramp on the training's device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from buoy.microbatch.sizing import Fit, Ramp, Sizer
from buoy.torch.allocations import AllocationWatch
from buoy.torch.memory import HostMemory, Memory


class MeasuredRamp:
    """A `Ramp` that is told its free bytes and peaks by the device's memory."""

    def __init__(self, most: int, memory: Memory, missing_state: Callable[[], int]) -> None:
        self._ramp = Ramp(max(1, most // 32))
        self._most = most
        self._memory = memory
        self._missing_state = missing_state
        self._base = self._watch_base = 0
        self.sizes: list[int] = []
        """Of the parts so far."""
        # Resident memory is what the kernel counts, but does not show what is freed and used again; this does.
        self._watch = AllocationWatch() if isinstance(memory, HostMemory) else None

    def watching(self) -> AbstractContextManager[object]:
        """To be around the parts."""
        return self._watch if self._watch is not None else nullcontext()

    def next(self, left: int) -> int:
        """Samples of the next part."""
        size = min(self._most, self._ramp.next(left))
        self.sizes.append(size)
        return size

    def measured(self, size: int) -> None:
        """A part of this size is done."""
        highest = self._memory.highest()
        if self._ramp.free is None:  # the first part: gradients are there now
            free = self._memory.free()
            self._ramp.free = None if free is None else free - self._missing_state()
            self._base = self._memory.used() or 0
        elif highest is not None:
            seen = self._watch.peak - self._watch_base if self._watch is not None else 0
            self._ramp.measured(size, max(highest - self._base, seen))
        self._memory.mark()
        if self._watch is not None:
            if not self._watch_base:
                self._watch_base = self._watch.live
            self._watch.peak = self._watch.live

    def learn(self, sizer: Sizer, each: float) -> None:
        """Hand on what was found."""
        self._ramp.finish()
        if self._ramp.line is not None:
            slope, besides = self._ramp.line
            sizer.fitted(Fit(slope / each, max(0.0, besides), each), self._ramp.samples, each)
