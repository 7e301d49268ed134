"""How much of a batch is on the device at once: pure decisions from what passed, what failed and what is free.

Sizes are kept as cost, the number of array elements, so that what was learned on short sequences serves for
long ones. `Sizer` never looks at a device; it is told.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_PATIENCE = 16  # clean steps before a larger size is tried
_MOST_PATIENCE = 1024
_SAME = 1.03  # sizes closer than this are not worth a failed try
_MARGIN = 0.98  # of the predicted maximum
_STEADY = 0.02  # a slope that changes less than this has left the flat part of the curve


@dataclass
class Sizer:
    """What is known about the sizes that fit."""

    most: int | None = None
    """The person's own upper bound, in samples."""
    limit: float = math.inf
    """Cost allowed at once; infinite until something was learned."""
    passed: float = 0.0
    """The largest cost that went through since something failed."""
    failed: float = math.inf
    """The smallest cost that did not."""
    clean: int = 0
    patience: int = _PATIENCE
    trying: float | None = None
    """The limit to go back to when the growth under way fails."""

    def samples(self, total: int, each: float) -> int:
        """Samples per micro-batch, for a batch of so many at this cost each."""
        size = total if self.limit == math.inf else max(1, min(total, int(self.limit / each + 1e-9)))
        return min(size, self.most) if self.most is not None else size

    def done(self, size: int, each: float, *, held_back: bool) -> bool:
        """A step went through with micro-batches of this size; True when the limit has grown for the next."""
        cost = size * each
        self.passed = max(self.passed, cost)
        if self.limit == math.inf or not held_back:
            return False
        if self.trying is not None and cost > self.trying:
            self.trying, self.patience = None, _PATIENCE
        self.clean += 1
        if self.clean < self.patience:
            return False
        self.clean = 0
        self.trying = max(self.limit, self.passed)
        middle = (self.limit + self.failed) / 2 if self.failed < math.inf else self.limit * 1.5
        # So close to an old failure that only a change elsewhere on the device can help: look beyond it, seldom.
        self.limit = middle if middle >= self.limit * _SAME and middle < self.failed else self.failed * 1.1
        return True

    def oom(self, size: int, each: float) -> int:
        """It did not fit; the size to go on with. 1 again when it was 1."""
        cost = size * each
        self.clean = 0
        self.failed = min(cost, self.failed) if self.trying is None else cost
        if self.trying is not None:
            self.patience = min(self.patience * 2, _MOST_PATIENCE)
            goal, self.trying = self.trying, None
        else:
            goal = self.passed
        if not cost / 8 <= goal <= cost / _SAME:
            goal = cost / 2  # nothing of that size is known to fit
        self.passed = min(self.passed, goal)
        # An even cut must come out smaller, whatever rounding does.
        size = max(1, min(size - 1, int(goal / each + 1e-9)))
        self.limit = size * each
        return size

    def fitted(self, cost: float) -> None:
        """A fit says that this cost is the most that there is room for."""
        self.limit, self.clean, self.trying = max(1.0, cost), 0, None

    def state_dict(self) -> dict[str, Any]:
        """Plain values; infinite is None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; the person's own bound stays the one given now."""
        for name in ("limit", "passed", "failed", "clean", "patience", "trying"):
            value = state.get(name)
            setattr(self, name, math.inf if value is None and name in ("limit", "failed") else value)


class Ramp:
    """The first batch in parts of growing size, each measured, until the line through them is straight.

    Gradients exist after the first part, so the line is that of activations alone; probing with a few samples
    and no gradients gives ten times too much or half (bench/recovery.py). Nothing is computed twice.
    """

    def __init__(self, start: int, free: float) -> None:
        self._points: list[tuple[int, float]] = []
        self._next = start
        self._free = free
        self._slope: float | None = None
        self.predicted: int | None = None
        """Samples that fit, once the slope is steady."""

    def next(self, left: int) -> int:
        """Samples of the next part, of so many that are left."""
        return min(left, self._next)

    def measured(self, size: int, peak: float) -> None:
        """The last part's size, and the bytes it needed above what was there before it."""
        if self._points and size <= self._points[-1][0]:
            return  # the remainder of the batch: says nothing new
        self._points.append((size, peak))
        self._next = size * 2
        if len(self._points) < 2:
            return
        (small, low), (large, high) = self._points[-2:]
        slope = (high - low) / (large - small)
        if slope <= 0:
            return
        room = int((self._free - (high - slope * large)) / slope * _MARGIN)
        steady = self._slope is not None and abs(slope - self._slope) <= _STEADY * slope
        self._slope = slope
        if steady:
            self.predicted = max(1, room)
        # Never beyond what this line allows, and past half of it the line is as good as it gets.
        self._next = max(1, min(self._next, room))
        if room < size * 2:
            self.predicted = max(1, room)
        if self.predicted is not None:
            self._next = self.predicted
