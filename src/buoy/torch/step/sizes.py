"""How many samples of a batch are computed at once: from the log of an earlier life, or from what fits here.

Measures the parts of a ramp on the training's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from buoy.microbatch.batch import Batch, even
from buoy.microbatch.sizing import SPARE, Fit, History, Ramp, SizeLog, Sizer, short
from buoy.torch.memory import device
from buoy.torch.memory.device import AllocationWatch, HostMemory, Memory, host_memory, left_in, memory_of
from buoy.torch.step.gradient import Trained
from buoy.torch.step.optimizer import expected_state


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


_SURELY = 1.25
"""Times what was measured: the heap has gaps."""


class Sizes:
    """Decides the size of each step; what it learns is kept with the checkpoint."""

    def __init__(
        self,
        say: Callable[[str], object],
        event: Callable[..., object],
        micro_batch: int | None,
        trained: Trained,
        optimizers: list[torch.optim.Optimizer],
        log: SizeLog | None = None,
    ) -> None:
        """The parameters and the list are the transaction's own, and grow with it. `log`: where every size is kept."""
        self._say, self._event = say, event
        self._sizer = Sizer(most=micro_batch)
        self.history = History()
        """Every change so far."""
        self._log = log
        self._logged = 0
        self._trained, self._optimizers = trained, optimizers
        self._plain = 0.0
        """The cost of the largest batch that went through whole, while nothing was ever split or measured; else 0."""
        self._largest = 0
        self._is_short_said = False
        self._short: tuple[int, int] | None = None
        """The size of the step under way and the bytes there are, where memory made it smaller than usual."""
        self.replays = False
        """The sizes of the step under way are those of the log."""
        self._measured = (0.0, 0)
        """The cost of the last batch that was measured whole, and the bytes that it needed."""

    def replay(self, sizes: list[dict[str, Any]], step: int, done: int) -> None:
        """Use the sizes that an earlier attempt has logged, as far as it came: `done` steps."""
        self._plain = 0.0
        self.history.replay(sizes, step, done)

    def plan(self, step: int, whole: Batch) -> tuple[list[int], MeasuredRamp | None]:
        """The parts of this batch, or the ramp that finds them while it measures."""
        self._short, self.replays = None, False
        if self._plain:  # the sizer knows of no limit
            return [whole.samples], None
        replayed = self.history.parts(step, whole.samples)
        if replayed is not None:
            if max(replayed) <= (self._sizer.most or whole.samples):
                self.replays = len(replayed) > 1
                return replayed, None
            self.history.leave()  # the bound was given anew, and is lower
        memory = memory_of(self._trained.first)
        free = self._free(memory, whole)
        size, ramp = self._sizer.samples(whole.samples, whole.each, free)
        if size >= whole.samples and not ramp:
            return [whole.samples], None
        usual = self._sizer.samples(whole.samples, whole.each, None)[0]
        if isinstance(memory, HostMemory) and (ramp or size < usual):
            memory.give_back()
            free = self._free(memory, whole)
            size, ramp = self._sizer.samples(whole.samples, whole.each, free)
        if ramp:
            return [whole.samples], MeasuredRamp(size, memory, self._missing_state)
        if size < usual and free is not None:
            self._short = size, free
        return even(whole.samples, size), None

    @contextmanager
    def limited(self, whole: Batch, parts: list[int]) -> Iterator[None]:
        """Around a try in parts of these sizes: out of memory is an exception, also where the kernel would kill."""
        memory = host_memory()
        with memory.limited():
            before = memory.used()
            memory.mark()
            yield
            highest = memory.highest()
        if before is not None and highest is not None:
            self._measured = (max(parts) * whole.each, highest - before)

    def surely_fits(self, whole: Batch, size: int, is_exact: bool) -> bool:
        """Whether so many samples at once need no limit around them: they are known to fit, or the device has its own.

        `is_exact`: the gradient is known to be a sum over samples.
        """
        # Samples that depend on each other may need more than in proportion (a matrix of all pairs).
        cost, need = self._measured
        is_known = size * whole.each <= cost
        if is_known and need * _SURELY <= SPARE:
            return True  # whatever else has the memory
        if not self._trained.first.is_cpu or device.pretended is not None:
            return True
        memory = host_memory()
        there = memory.free()
        # Gradients, and state of any optimizer known, are at most four times the gradients.
        if there is None or (is_known and need * _SURELY + 4 * self._trained.gradient_bytes <= there):
            return True
        free = left_in(memory, self._missing_bytes())
        assert free is not None
        if self._sizer.fit is not None and is_exact:
            return self._sizer.fit.samples(free, whole.each) >= size
        return is_known and need * _SURELY <= free

    @property
    def is_bound(self) -> bool:
        """The user has given an upper bound."""
        return self._sizer.most is not None

    def is_only_asked(self, whole: Batch) -> bool:
        """A split is asked for by the user's own bound alone: as far as is known, the batch fits."""
        if self._sizer.most is None:
            return False
        free = self._free(memory_of(self._trained.first), whole)
        size, ramp = replace(self._sizer, most=None).samples(whole.samples, whole.each, free)
        return size >= whole.samples and not ramp

    def note(self, bytes_per_sample: float | None, whole: Batch) -> None:
        """The probe has seen what a sample takes, roughly."""
        if bytes_per_sample and self._sizer.fit is None:
            self._plain = 0.0
            self._sizer.fit = Fit(bytes_per_sample / whole.each, 0.0, whole.each, rough=True)

    def has_passed(self, size: int, whole: Batch) -> bool:
        """So many of these samples have been computed at once before."""
        return size * whole.each <= self._sizer.passed

    def after_oom(self, size: int, whole: Batch) -> int:
        """So many did not fit: how many to continue with."""
        self._plain = 0.0
        return self._sizer.oom(size, whole.each)

    def follow(self, smaller: int, size: int, whole: Batch) -> None:
        """Another rank continues with fewer."""
        self._plain = 0.0
        self.history.leave()
        self._sizer.follow(smaller, size, whole.each)

    def learn(self, step: int, whole: Batch, parts: list[int], ramp: MeasuredRamp | None) -> None:
        """The step went through. Logged before anybody hears of it: it may be killed then."""
        if not (self._plain and whole.elements <= self._plain and whole.samples <= self._largest):
            self._learn(step, whole, parts, ramp)
        if self._log is not None:
            self._log.step(step + 1, self.history.entries[self._logged :])
            self._logged = len(self.history.entries)

    def _learn(self, step: int, whole: Batch, parts: list[int], ramp: MeasuredRamp | None) -> None:
        if whole.samples > self._largest:  # an epoch's last batch is often smaller
            self._largest = whole.samples
            self._event("batch", step=step, samples=whole.samples)
        if ramp is not None:
            ramp.learn(self._sizer, whole.each)
            parts = ramp.sizes
        self._sizer.done(max(parts), whole.each, held_back=ramp is None and len(parts) > 1)
        self.history.note(step, whole.samples, parts, self._sizer)
        if ramp is None:
            is_plain = len(parts) == 1 and self._sizer.is_untaught and not self.history.is_replaying(step + 1)
            self._plain = float(self._sizer.passed) if is_plain else 0.0
            return
        size, _ = self._sizer.samples(whole.samples, whole.each, None)
        if size < whole.samples:
            self._say(f"{count_of(whole.samples)} would not fit in memory; using micro-batches of {size}")
        elif len(parts) > 1 and not self._is_short_said:  # once: it stays short for a while
            self._is_short_said = True
            self._say(
                f"memory is short: the batch of step {step + 1} was split to measure it, at most {max(parts)} of "
                f"{whole.samples} samples at a time"
            )
        self._event("sized", step=step + 1, samples=size, of=whole.samples)

    def say_short(self, step: int, whole: Batch) -> None:
        """Once: how much is free changes from step to step."""
        if self._is_short_said or self._short is None:
            return
        self._is_short_said = True
        size, free = self._short
        self._say(short(size, whole.samples, free))
        self._event("sized", step=step, samples=size, of=whole.samples)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the same sizes."""
        return {"sizer": self._sizer.state_dict(), "history": self.history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._plain = 0.0
        self._sizer.load_state_dict(state["sizer"])
        self.history.load_state_dict(state["history"])

    def _free(self, memory: Memory, whole: Batch) -> int | None:
        """Bytes for activations; None when nothing tells, or nothing has to be asked."""
        # The host's memory changes by others' doing; a device's reading is only needed for what was never tried.
        if not isinstance(memory, HostMemory) and self.has_passed(whole.samples, whole):
            return None
        return left_in(memory, self._missing_bytes())

    def _missing_bytes(self) -> int:
        """Gradients and optimizer state that are still to be made."""
        first = self._trained.now[:1]
        gradients = 0 if first and first[0].grad is not None else self._trained.gradient_bytes
        return gradients + self._missing_state()

    def _missing_state(self) -> int:
        missing = 0
        for optimizer in self._optimizers:
            if not optimizer.state:
                missing += expected_state(optimizer)
        return missing


def count_of(samples: int) -> str:
    """`1 sample`, `8 samples`.

    >>> count_of(8)
    '8 samples'
    """
    return "1 sample" if samples == 1 else f"{samples} samples"
