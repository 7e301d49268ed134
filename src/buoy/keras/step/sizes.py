"""How many samples of a batch are computed at once: from the log of an earlier life, or from what fits here.

That is found by computing a few samples and measuring: never by trial and death. What a step needs is the largest of
several lines over its samples (activations; the gradients of one layer), so it bends upwards: bytes per sample at a
small size, times any larger size, is never too little. That bound says where it is safe to measure next. The line
through the last sizes is trusted for a short way only: another one may begin.

Of a batch that cannot be split only a small part is measured, since TensorFlow's pool never gives back what a rehearsal
took; the shapes in the graph tell how its need grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

from buoy.keras.memory.device import Memory
from buoy.microbatch.batch import even
from buoy.microbatch.errors import CannotSplit, is_oom
from buoy.microbatch.sizing import SPARE, Fit, History, Sizer, short
from buoy.units import format_bytes

if TYPE_CHECKING:
    from buoy.keras.step.compiled import CompiledStep

Measure = Callable[[int], int | None]
"""Bytes that so many samples needed; None when they did not fit."""

_MARGIN = 0.98  # of the predicted maximum
_STRAIGHT = 0.05  # change of slope, relative, within which the last sizes are on one line
_TRUSTED = 1.25  # growth over which a straight line is trusted; then it is measured again
_WORTH = 1.1  # growth below which another measurement tells nothing new


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured."""

    samples: int
    """That fit at once; never less than what was just computed."""
    slope: float
    """Bytes per sample."""
    besides: float = 0.0
    """Bytes that do not grow with the samples."""


def climb(measure: Measure, start: int, most: int, room: Callable[[], float]) -> Reading:
    """Measure growing sizes from `start` on, until it is known whether `most` samples fit into the room there is.

    That is asked for each time: what a measurement leaves behind in the allocator's gaps is gone.

    >>> climb(lambda n: 1000 + 10 * n, start=4, most=64, room=lambda: 100_000)
    Reading(samples=64, slope=260.0, besides=0.0)
    >>> climb(lambda n: 1000 + 10 * n, start=4, most=640, room=lambda: 3000).samples
    196
    """
    points: list[tuple[int, float]] = []
    slopes: list[float] = []
    size = min(start, most)
    while True:
        needed = measure(size)
        if needed is None:
            return _before(points, size)
        points.append((size, max(1.0, needed)))
        free = room()
        each = points[-1][1] / size
        if each * most <= free:
            return Reading(most, each)
        if len(points) > 1:
            (small, low), (large, high) = points[-2:]
            slopes.append((high - low) / (large - small))
        safe = max(1, int(free * _MARGIN / each))
        end = _end(points, slopes, free)
        further = safe if end is None else max(safe, min(end, int(size * _TRUSTED)))
        larger = min(2 * size, further, most)
        if larger < size * _WORTH:
            largest = max(size, larger)
            return Reading(largest, each) if end is None else _on_the_line(points, slopes, largest)
        size = larger


def _end(points: list[tuple[int, float]], slopes: list[float], free: float) -> int | None:
    """Samples up to the end of the line; None while it is not straight."""
    if len(slopes) < 2 or slopes[-1] <= 0 or abs(slopes[-1] - slopes[-2]) > _STRAIGHT * slopes[-1]:
        return None
    size, needed = points[-1]
    return int((free - needed + slopes[-1] * size) / slopes[-1] * _MARGIN)


def _on_the_line(points: list[tuple[int, float]], slopes: list[float], samples: int) -> Reading:
    size, needed = points[-1]
    return Reading(samples, slopes[-1], max(0.0, needed - slopes[-1] * size))


def _before(points: list[tuple[int, float]], size: int) -> Reading:
    """The last size that fitted."""
    if not points:
        return Reading(max(1, size // 2), 0.0)
    last, needed = points[-1]
    return Reading(last, needed / last)


PART = 32
"""The part of the whole batch's need that is computed to measure it."""


class Growth:
    """Bytes over samples: a parabola through what all results of the step take for the whole, a half and a quarter.

    What does not grow, the gradients, is left out: a few samples have made it before anything is measured.

    >>> Growth(lambda n: 10 * n, 64).times(2)
    32.0
    >>> pairs = Growth(lambda n: 7 * n * n, 64)
    >>> pairs.times(16), pairs.part(16)
    (16.0, 16)
    >>> weights = Growth(lambda n: 1000 + n, 64)
    >>> weights.part(32), weights.times(2)
    (2, 32.0)
    """

    def __init__(self, results: Callable[[int], int], rows: int) -> None:
        half, quarter = rows // 2, rows // 4
        whole = results(rows)
        self._rows, self._line, self._square = rows, whole / rows, 0.0
        if quarter:
            middle = results(half)
            upper = (whole - middle) / (rows - half)
            lower = (middle - results(quarter)) / (half - quarter)
            self._square = max(0.0, (upper - lower) / (rows - quarter))
            self._line = max(0.0, upper - self._square * (rows + half))

    def times(self, samples: int) -> float:
        """How often the need of so many samples is in that of all."""
        return self._at(self._rows) / max(1.0, self._at(samples))

    def part(self, share: int) -> int:
        """The samples that need this share of what all need."""
        wanted = self._at(self._rows) / share
        root = sqrt(self._line**2 + 4 * self._square * wanted)
        return max(1, round(2 * wanted / (root + self._line))) if wanted else 1

    def _at(self, samples: int) -> float:
        return self._line * samples + self._square * samples * samples


Say = Callable[[str], object]
Event = Callable[..., object]

_TIMES = 3
"""TensorFlow computes in no fixed order, and in some orders more is held at once."""


class Sizes:
    """Decides the size of each step; what it learns is kept with the checkpoint."""

    def __init__(self, say: Say, event: Event, micro_batch: int | None) -> None:
        self._say, self._event = say, event
        self._sizer = Sizer(most=micro_batch)
        self._history = History()
        self._largest = 0
        self._has_said_short = False
        self._measures = True
        """Until a measurement shows that none can be made, or that the batch cannot be split."""
        self._refusal: CannotSplit | None = None
        """Why batches cannot be split, where their need is foreseen instead."""
        self._sure = 0.0
        """The largest cost of a whole batch that was foreseen to fit, or went through, in this process."""
        self._touched: tuple[int, int] | None = None
        """Samples of the whole step that were computed when the pool was new, and what they took from the system."""

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Every change so far, for `replay`."""
        return self._history.entries

    def replay(self, entries: list[dict[str, Any]], first: int, done: int) -> None:
        """Use the sizes that an earlier attempt has logged, from step `first` on, as far as it came: `done` steps."""
        self._history.replay(entries, first, done)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues with."""
        return {"sizer": self._sizer.state_dict(), "history": self._history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizer.load_state_dict(state["sizer"])
        self._history.load_state_dict(state["history"])

    def choose(self, step: CompiledStep, number: int, data: Any, rows: int, each: float) -> int:
        """Samples at once for this batch of `rows` samples, each of so many elements."""
        parts = self._history.parts(number, rows)
        if parts is not None:
            return max(parts)
        wanted, _ = self._sizer.samples(rows, each, None)
        memory = step.memory(data) if self._measures else None
        if memory is None or (not memory.shared and wanted * each <= self._sizer.passed):
            return max(even(rows, wanted))
        # A size that the user named is tried as it is: a forecast may be wrong by a few MiB.
        if self._sizer.fit is None and step.rehearses_whole and wanted == rows and self._sizer.most is None:
            self._bound(step, memory, data, rows, each)
        if self._refusal is not None:
            self._foresee(step, memory, data, rows, each)
            return max(even(rows, wanted))
        size, unsure = self._sizer.samples(rows, each, _free(memory))
        if (unsure or count(rows, size) > count(rows, wanted)) and memory.give_back():
            size, unsure = self._sizer.samples(rows, each, _free(memory))
        if unsure:
            size = self._learn(self._reading(step, memory, data, rows, each, size), number, rows, each, size)
        elif count(rows, size) > count(rows, wanted):
            self._report_short(number, size, rows, _free(memory))
        return max(even(rows, size))

    def _report_short(self, number: int, size: int, rows: int, free: int | None) -> None:
        """Once: how much is free changes from step to step."""
        if self._has_said_short or free is None:
            return
        self._has_said_short = True
        self._say(short(size, rows, free))
        self._event("sized", step=number, samples=size, of=rows)

    def oom(self, step: CompiledStep, number: int, data: Any, rows: int, each: float, size: int) -> int:
        """It did not fit; the size to continue with."""
        self._history.leave()
        fit = self._sizer.fit
        smaller = self._sizer.oom(size, each)
        memory = step.memory(data) if self._measures and (fit is None or fit.rough) and smaller > 1 else None
        # Where the host itself has run out, tracing a graph to measure it may end the process.
        if memory is not None and not memory.shared:
            reading = self._reading(step, memory, data, rows, each, size)
            if reading is not None and reading.samples < size:
                smaller = self._learn(reading, number, rows, each, size)
            else:  # the device has less than it says: only failures tell
                self._measures = False
        return max(even(rows, smaller))

    def done(self, number: int, rows: int, each: float, size: int) -> None:
        """A step went through."""
        if rows > self._largest:  # an epoch's last batch is often smaller
            self._largest = rows
            self._event("batch", step=number, samples=rows)
        parts = even(rows, size)
        if len(parts) == 1:
            self._sure = max(self._sure, rows * each)
        self._sizer.done(max(parts), each, held_back=len(parts) > 1)
        self._history.note(number, rows, parts, self._sizer)

    def _bound(self, step: CompiledStep, memory: Memory, data: Any, rows: int, each: float) -> None:
        """An upper bound of what a sample needs: enough to know that the whole batch fits, which it mostly does."""
        free = _free(memory)
        if free is None:
            self._measures = False
            return
        known = step.bound(data)
        start = max(1, rows // PART)
        reading: Reading | None
        if known is not None and known <= free:
            reading = Reading(rows, known / rows)
        elif memory.shared:
            reading = self._touch(step, memory, data, start)
            worst = rows * PART if step.compares(data) else rows
            if reading is not None and reading.slope * worst > free:
                self._refusal = _refusal(step, data)
                if self._refusal is None:
                    reading = self._climb(step, memory, data, start, rows, split=False)
        else:
            reading = self._climb(step, memory, data, start, rows, split=False)
        if reading is not None and reading.slope > 0:
            self._sizer.fit = Fit(reading.slope / each, reading.besides, each, rough=True)

    def _reading(
        self, step: CompiledStep, memory: Memory, data: Any, rows: int, each: float, size: int
    ) -> Reading | None:
        """What micro-batches need, from measuring small ones; None where that is not possible."""
        try:
            step.prepare(data)
        except CannotSplit as refusal:
            if memory.shared and step.rehearses_whole:
                self._refusal = refusal
                self._foresee(step, memory, data, rows, each)
                return None
            self._measures = False
            self._say(
                f"{rows} samples may not fit in memory, and this batch cannot be split: {refusal.message}"
            )
            return None
        except Exception as error:  # not even a few samples fit beside what is held now: the step will say so
            if not is_oom(error):
                raise
            self._measures = False
            return None
        fit, free = self._sizer.fit, _free(memory)
        guess = fit.samples(free, each) if fit is not None and free is not None else rows
        # More than half of a batch is never computed at once, unless it is all of it, which was measured whole.
        most = min(size, count(rows, 2)) if step.rehearses_whole else size
        return self._climb(step, memory, data, max(1, min(rows, guess) // 8), most, split=True)

    def _learn(self, reading: Reading | None, number: int, rows: int, each: float, size: int) -> int:
        """The size that was found, and no word about it where it is the one that was wanted."""
        if reading is None:
            return size
        if reading.slope > 0:
            line = Fit(reading.slope / each, reading.besides, each)
            self._sizer.fitted(line, reading.samples if reading.samples < rows else None, each)
        if reading.samples < size:
            self._say(f"{rows} samples would not fit in memory; using micro-batches of {reading.samples}")
            self._event("sized", step=number, samples=reading.samples, of=rows)
        return min(size, reading.samples)

    def _foresee(self, step: CompiledStep, memory: Memory, data: Any, rows: int, each: float) -> None:
        """Refuse in words a batch that cannot be split and would be killed by the kernel."""
        if rows * each <= self._sure:
            return
        memory.give_back()
        try:
            growth = Growth(lambda samples: step.results(data, samples), rows)
            part = growth.part(PART)
            # Once: what the pool has is used again, and does not show.
            if self._touched is None or (not self._sure and part > self._touched[0] * 1.5):
                self._touch(step, memory, data, part)
        except Exception as error:  # noqa: BLE001 - as above
            self._cannot_measure(error)
        left = memory.left()
        if left is None or self._touched is None or not self._measures:
            return
        samples, grown = self._touched
        needed = int(grown * growth.times(samples))
        if needed <= left:
            self._sure = rows * each
            return
        self._say(
            f"{rows} samples would not fit in memory: they need about {format_bytes(needed)}, and "
            f"{format_bytes(left)} are left (`micro_batch={rows}` tries it all the same)"
        )
        assert self._refusal is not None
        raise self._refusal

    def _touch(self, step: CompiledStep, memory: Memory, data: Any, samples: int) -> Reading | None:
        """Compute so many samples of the whole step for the first time, after a few for all that is made once."""
        try:
            few = min(samples, max(2, samples // PART))
            if _measured(step, memory, data, few, split=False, times=_TIMES) is None:
                return None
            needed = _measured(step, memory, data, samples, split=False, times=_TIMES)
            grown = memory.grown()
        except Exception as error:  # noqa: BLE001 - what is wrong with the step, the step itself will say
            self._cannot_measure(error)
            return None
        if needed is None or grown is None:
            return None
        self._touched = samples, grown
        return Reading(samples, needed / samples)

    def _climb(
        self, step: CompiledStep, memory: Memory, data: Any, start: int, most: int, *, split: bool
    ) -> Reading | None:
        """Measure; None, for good, where that is not possible."""

        def measure(samples: int) -> int | None:
            return _measured(step, memory, data, samples, split=split, again=True)

        try:
            if measure(start) is None:  # also makes the graph, and all that is made once
                return Reading(max(1, start // 2), 0.0)
            return climb(measure, start, most, lambda: _free(memory) or 0)
        except Exception as error:  # noqa: BLE001 - what is wrong with the step, the step itself will say
            self._cannot_measure(error)
            return None

    def _cannot_measure(self, error: Exception) -> None:
        self._measures = False
        self._event("trouble", what=f"the step could not be measured: {type(error).__name__}: {error}"[:300])


def _measured(
    step: CompiledStep,
    memory: Memory,
    data: Any,
    samples: int,
    *,
    split: bool,
    times: int = 1,
    again: bool = False,
) -> int | None:
    """Bytes that so many samples needed at most; None where they did not fit."""
    try:
        step.rehearse(data, samples, split, lambda: memory.mark(again))
        for _ in range(times - 1):
            step.rehearse(data, samples, split, lambda: None)
    except Exception as error:
        if not is_oom(error):
            raise
        return None
    return memory.rise()


def _refusal(step: CompiledStep, data: Any) -> CannotSplit | None:
    """Why the batch cannot be split; None where it can, or where there is not even memory to find out."""
    try:
        step.prepare(data)
    except CannotSplit as refusal:
        return refusal
    except Exception as error:
        if not is_oom(error):
            raise
    return None


def _free(memory: Memory) -> int | None:
    free = memory.free()
    return max(free, SPARE) if free is not None and memory.shared else free


def count(rows: int, size: int) -> int:
    """Micro-batches of at most so many samples."""
    return ceil(rows / size)
