"""How a series grows: a history that fades with age, and a robust line through its last so many seconds."""

from __future__ import annotations

from itertools import pairwise
from math import inf

_SPACING = 0.18
"""Seconds between kept samples: the caller may feed faster, the highest value in between counts."""
_PER_LEVEL = 16
"""Points per level of the history, each twice as coarse as the one before: 24 h are some 220 points."""
_CELLS = 24
"""A window is judged on at most so many equally spaced points."""
_FEWEST_POINTS = 8
_FEWEST_STEPS = 5
_SMALLEST_RISE = 0.01
"""Of the limit: less than this within a window is not growth."""
_JUMPS = (0.4, 0.6, 0.8)
"""The largest, the two largest and the three largest jumps may be at most this part of the whole rise."""
_SMALLEST_QUARTER = 0.65
"""Each quarter of a window must bring at least this part of the average quarter."""
_FLATTENING = 0.7
"""Growth that slows by more than this from one part of the window to the next is taken to end."""
_PLATEAU_MARGIN = 1.1
_DOUBT = 0.3
"""How many times the noise a reading may be off, against us."""

Point = tuple[float, float, float]
"""Seconds, steps, bytes."""


class History:
    """Peaks of a series: fine where they are recent, coarser with age, in constant memory."""

    __slots__ = ("_kept_t", "_levels")

    def __init__(self) -> None:
        self._levels: list[list[Point]] = [[]]
        self._kept_t = -inf

    def add(self, point: Point) -> None:
        """Append a reading; of readings that come too fast the highest is kept."""
        newest = self._levels[0]
        if newest and point[0] - self._kept_t < _SPACING:
            if point[2] >= newest[-1][2]:
                newest[-1] = point
            return
        newest.append(point)
        self._kept_t = point[0]
        for depth, level in enumerate(self._levels):
            if len(level) <= _PER_LEVEL + 1:
                return
            # The two oldest points of a full level become one of the next: the higher, with its own time.
            first, second = level[0], level[1]
            del level[:2]
            if depth + 1 == len(self._levels):
                self._levels.append([])
            self._levels[depth + 1].append(first if first[2] > second[2] else second)

    def points(self) -> list[Point]:
        """All points, the oldest first."""
        return [point for level in reversed(self._levels) for point in level]

    def start(self) -> float:
        """The time of the oldest point."""
        return self._levels[-1][0][0]


class Growth:
    """The growth within one window, per step where steps explain it at least as well as the clock."""

    __slots__ = (
        "_axis", "_cells", "_halves", "_noise", "_peaks",
        "enough_steps", "is_clear", "per_second", "per_step", "rise", "rises", "since", "steady", "top",
    )  # fmt: skip

    def __init__(self, cells: list[Point], limit: float) -> None:
        self._cells = cells
        self.since = cells[0][0]
        """When the window begins."""
        self._axis = 0
        self._peaks = _rising(cells)
        start, middle, end = cells[0], cells[len(cells) // 2], cells[-1]
        # The upper edge of the line counts: a peak as high above it as any before it must fit, too.
        slope, self._noise, self.top = _line(cells, 0)
        self.per_second = slope
        self.per_step: float | None = None
        self.enough_steps = end[1] - start[1] >= _FEWEST_STEPS
        if self.enough_steps:
            per_step, noise, top = _line(cells, 1)
            if noise <= 1.25 * self._noise:
                pace = (end[1] - middle[1]) / (end[0] - middle[0])
                self._axis, self._noise, self.top = 1, noise, top
                slope = self.per_step = per_step
                self.per_second = per_step * pace
        distance = end[self._axis] - start[self._axis]
        self.rise = slope * distance
        self.rises = self.per_second > 0 and self.rise > max(2 * self._noise, _SMALLEST_RISE * limit)
        self.is_clear = self.rises and self.rise > 4 * self._noise
        early, early_noise, _ = _line(cells[: len(cells) // 2 + 1], self._axis)
        late, late_noise, _ = _line(cells[len(cells) // 2 :], self._axis)
        self._halves = (early * distance / 2, late * distance / 2)
        slack = 0.3 * abs(self.rise) + 3 * max(self._noise, early_noise, late_noise)
        self.steady = abs(self._halves[1] - self._halves[0]) <= slack / 2

    def is_even(self) -> bool:
        """Whether the rise is spread over the window, rather than done in a few jumps."""
        peaks = [cell[2] for cell in self._peaks]
        total = peaks[-1] - peaks[0]
        jumps = sorted((late - early for early, late in pairwise(peaks)), reverse=True)
        return total > 0 and all(
            sum(jumps[:count]) <= part * total for count, part in enumerate(_JUMPS, start=1)
        )

    def goes_on(self) -> bool:
        """Whether every quarter of the window takes part: two warm-ups with a rest between are no leak."""
        marks = [self._level_at(part / 4) for part in range(5)]
        quarters = [late - early for early, late in pairwise(marks)]
        return min(quarters) + _DOUBT * self._noise >= _SMALLEST_QUARTER * sum(quarters) / 4

    def flattens(self, limit: float) -> bool:
        """Whether the growth may bend towards a plateau below the limit (Aitken's delta squared).

        The first third is left out, so that a warm-up before a leak does not hide it.
        """
        marks = [self._level_at(part / 3) for part in (1, 2, 3)]
        if max(marks) - self._cells[0][2] < _SMALLEST_RISE * limit:
            return False
        thirds = (marks[1] - marks[0], marks[2] - marks[1])
        return self._bends(*thirds, limit) or (self.steady and self._bends(*self._halves, limit))

    def breaks_new_ground(self, points: list[Point]) -> bool:
        """Whether the window rises above all that was reached before it."""
        start = self._cells[0][0]
        before = max((used for t, _, used in points if t <= start), default=0.0)
        return self.top - before >= 0.5 * self.rise

    def _bends(self, before: float, after: float, limit: float) -> bool:
        before, after = before + _DOUBT * self._noise, after - _DOUBT * self._noise
        if before <= 0 or after >= before:
            return False
        ratio = max(0.0, after / before)
        plateau = self._cells[-1][2] + after * ratio / (1 - ratio)
        return ratio < _FLATTENING or plateau < _PLATEAU_MARGIN * limit

    def _level_at(self, part: float) -> float:
        """The level at this part of the window: the median of the three cells nearest to it."""
        axis = self._axis
        # From the second cell to the last but one: beyond them the nearest three lie all on one side.
        start, end = self._cells[1][axis], self._cells[-2][axis]
        place = start + (end - start) * part
        nearest = sorted(self._peaks, key=lambda cell: abs(cell[axis] - place))[:3]
        return _median([cell[2] for cell in nearest])


def growth_since(points: list[Point], since: float, limit: float) -> Growth | None:
    """The growth since then, from the highest point of each equal stretch of time.

    None when there are too few points, or so little change that no shorter window can hold growth either.
    """
    width = (points[-1][0] - since) / _CELLS
    cells: list[Point] = []
    last = -1
    for point in points:
        if point[0] < since:
            continue
        cell = int((point[0] - since) / width) if width > 0 else 0
        if cell == last:
            if point[2] > cells[-1][2]:
                cells[-1] = point
        else:
            cells.append(point)
            last = cell
    levels = [cell[2] for cell in cells]
    if len(cells) < _FEWEST_POINTS or max(levels) - min(levels) < _SMALLEST_RISE * limit:
        return None
    return Growth(cells, limit)


def _rising(cells: list[Point]) -> list[Point]:
    """The highest level so far at each cell: what falls and comes back leaves no trace in it."""
    peaks = []
    peak = -inf
    for t, step, used in cells:
        peak = max(peak, used)
        peaks.append((t, step, peak))
    return peaks


def _line(cells: list[Point], axis: int) -> tuple[float, float, float]:
    """Slope (median over pairs half a window apart), noise about it, and its upper edge at the end."""
    half = len(cells) // 2
    slopes = []
    for early, late in zip(cells, cells[half:], strict=False):
        distance = late[axis] - early[axis]
        if distance > 0:
            slopes.append((late[2] - early[2]) / distance)
    if not slopes:
        return 0.0, inf, max(cell[2] for cell in cells)
    slope = _median(slopes)
    rests = [cell[2] - slope * cell[axis] for cell in cells]
    middle = _median(rests)
    noise = 1.48 * _median([abs(rest - middle) for rest in rests])
    return slope, noise, max(rests) + slope * cells[-1][axis]


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
