"""When will a resource run out? A leak is told with its time left; a warm-up is left in peace.

A series (RAM, VRAM, disk, shm) is kept as a history that fades: fine where it is recent, coarser with age,
so that a leak of ten seconds and one of ten hours are judged by the same rules at the same cost. The growth
is fitted per step and turned into seconds by the recent pace of steps; without steps, or where the clock
explains the growth better, per second.

An alarm needs all of this, for a few fits in a row:
- training has begun, and the growth was seen over enough samples and steps;
- it rises well above the noise, and not in one or two jumps (the first step, the first evaluation);
- it does not flatten: three points in a row (Aitken) do not lead to a plateau below the limit;
- it breaks new ground: what falls and comes back (garbage collection, epochs, checkpoints) is no leak;
- what was seen is not stretched more than a few times over, and ends within the horizon.

What cannot be told: a cache that fills in a straight line and then stops is a leak until it stops. It is
announced like one above half of the limit ("if it goes on"), and the alarm ends with the growth. Where no
step has ever been counted, loading a data set looks just like that: there the alarm waits for 85 %.
A burst (most of the memory within a few seconds) is over before anything can be fitted.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf

_SPACING = 0.4
"""Seconds between kept samples: the caller may feed faster, the highest value in between counts."""
_PER_LEVEL = 16
"""Points per level of the history, each twice as coarse as the one before: 24 h are some 220 points."""
_CELLS = 24
"""A window is judged on at most so many equally spaced points."""
_FEWEST_POINTS = 8
_FEWEST_STEPS = 5

_ALARM_SHARE = 0.5
_ALARM_SHARE_WITHOUT_STEPS = 0.85
_HORIZON = 1800.0
_STRETCH = 4.0
"""The growth seen is extrapolated to at most so many times its size."""
_FITS_IN_A_ROW = 3

_OTHER_WINDOWS = (0.7, 0.85, 1.2, 1.4, 1.7)
K2, K3, K4 = 0.7, 1.1, -2
_Point = tuple[float, float, float]  # seconds, steps, bytes


class Outlook:
    """What is to be expected of one resource. Unknown is None: no growth means no `seconds`."""

    __slots__ = ("alarm", "at_step", "limit", "name", "per_second", "per_step", "seconds", "share", "used")

    def __init__(
        self,
        name: str,
        used: float,
        limit: float,
        seconds: float | None = None,
        per_step: float | None = None,
        per_second: float | None = None,
        at_step: int | None = None,
        alarm: bool = False,
    ) -> None:
        self.name = name
        self.used = used
        self.limit = limit
        self.share = used / limit
        self.seconds = seconds
        """Seconds to exhaustion, if the growth goes on."""
        self.per_step = per_step
        self.per_second = per_second
        self.at_step = at_step
        """The step at which it will be full."""
        self.alarm = alarm

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


class Forecast:
    """Watches one resource. `limit` and `horizon` may be changed at any time; without a limit no forecast."""

    def __init__(self, name: str, limit: float | None) -> None:
        self.name = name
        self.limit = limit
        self.horizon = _HORIZON
        """Exhaustion is an alarm within so many seconds: the session's time left, if that is shorter."""
        self._levels: list[list[_Point]] = [[]]
        self._first_step = 0
        self._last: _Point | None = None
        self._kept_t = -inf
        self._fitted_t = -inf
        self._fitted_used = 0.0
        self._outlook: Outlook | None = None
        self._streak = 0
        self._reminder = _Reminder()

    def feed(self, t: float, step: int | None, used: float | None) -> None:
        """One reading: monotonic seconds, steps done (None or 0: none yet), bytes used."""
        if used is None:
            return
        steps = step or 0
        if (self._first_step == 0 and steps > 0) or steps < self._first_step:
            # The first step ends the warm-up; a counter that went back is a new training.
            self._first_step = steps
            self._levels = [[]]
            self._streak = 0
        point = (t, float(steps), float(used))
        self._last = point
        newest = self._levels[0]
        if newest and t - self._kept_t < _SPACING:
            if used >= newest[-1][2]:
                newest[-1] = point
            return
        newest.append(point)
        self._kept_t = t
        self._fade()

    def exhaustion(self) -> Outlook | None:
        """The outlook as of the last reading; None without a reading or a limit."""
        if self._last is None or not self.limit:
            return None
        t, _, used = self._last
        span = t - self._levels[-1][0][0]
        pause = min(10.0, max(1.0, span / 50))
        moved = abs(used - self._fitted_used) > 0.02 * self.limit
        if self._outlook is None or t - self._fitted_t >= (1.0 if moved else pause):
            self._outlook = self._judge()
            self._fitted_t = t
            self._fitted_used = used
        return self._outlook

    def news(self) -> Outlook | None:
        """The outlook when it should be told: a new alarm, or one whose time left has halved since."""
        return self._reminder.due(self._last[0], self.exhaustion()) if self._last else None

    def _fade(self) -> None:
        """Merge the two oldest points of a full level into one of the next: the higher, with its own time."""
        for depth, level in enumerate(self._levels):
            if len(level) <= _PER_LEVEL + 1:
                return
            first, second = level[0], level[1]
            del level[:2]
            if depth + 1 == len(self._levels):
                self._levels.append([])
            self._levels[depth + 1].append(first if first[2] > second[2] else second)

    def _judge(self) -> Outlook:
        assert self._last is not None and self.limit
        limit = self.limit
        now, step, used = self._last
        points = [point for level in reversed(self._levels) for point in level]
        best: _Window | None = None
        best_length = 0.0
        settled = True
        length = now - points[0][0]
        while length > 0:
            window = _window(points, now - length, limit)
            if window is None:
                break
            settled = settled and not window.flattens(limit)
            if window.rises and (best is None or not best.steady):
                best, best_length = window, length
            if best is not None and best.steady:
                break
            length /= 2
        outlook = Outlook(self.name, used, limit)
        if best is None or best.per_second <= 0:
            self._streak = 0
            return outlook
        room = max(0.0, limit - best.top)
        outlook.per_second = best.per_second
        outlook.seconds = room / best.per_second
        if best.per_step is not None and best.per_step > 0:
            outlook.per_step = best.per_step
            outlook.at_step = int(step + room / best.per_step)
        threshold = _ALARM_SHARE if self._first_step else _ALARM_SHARE_WITHOUT_STEPS
        leaking = (
            outlook.share >= threshold
            and outlook.seconds <= self.horizon
            and best.steady
            and settled
            and best.even
            and best.new_ground(points)
            and best.rise * _STRETCH >= room
            and (not self._first_step or best.steps >= _FEWEST_STEPS)
            # A second warm-up begins anywhere: look at it from windows that start a little earlier or later.
            and not any(
                window is not None and window.flattens(limit, K4)
                for window in (_window(points, now - part * best_length, limit) for part in _OTHER_WINDOWS)
            )
        )
        self._streak = self._streak + 1 if leaking else 0
        outlook.alarm = self._streak >= _FITS_IN_A_ROW
        return outlook


class Deadline:
    """The session's own time, as a resource: certain to run out, so the alarm is only a matter of when."""

    name = "time"

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        """Seconds the session may last; None when not known: then there is no outlook."""
        self._elapsed = 0.0
        self._step = 0
        self._step_seconds: float | None = None
        self._reminder = _Reminder()

    def feed(self, elapsed: float, step: int | None, step_seconds: float | None) -> None:
        """Seconds since the session began, steps done, and how long a step takes now."""
        self._elapsed, self._step, self._step_seconds = elapsed, step or 0, step_seconds

    def exhaustion(self) -> Outlook | None:
        """The time left; an alarm in the last tenth of the session, and in its last half hour at most."""
        if not self.limit:
            return None
        left = max(0.0, self.limit - self._elapsed)
        outlook = Outlook(self.name, self._elapsed, self.limit, seconds=left, per_second=1.0)
        if self._step and self._step_seconds:
            outlook.per_step = self._step_seconds
            outlook.at_step = int(self._step + left / self._step_seconds)
        outlook.alarm = left <= min(_HORIZON, 0.1 * self.limit)
        return outlook

    def news(self) -> Outlook | None:
        """The outlook when it should be told: at the first alarm, and whenever the time left has halved."""
        return self._reminder.due(self._elapsed, self.exhaustion())


class _Reminder:
    """Decides when an alarm is told again: at most once a minute, and only once the time left has halved."""

    __slots__ = ("_seconds", "_t")

    def __init__(self) -> None:
        self._t = -inf
        self._seconds = inf

    def due(self, t: float, outlook: Outlook | None) -> Outlook | None:
        if outlook is None or not outlook.alarm or outlook.seconds is None:
            return None
        if t - self._t < 60 or outlook.seconds > 0.5 * self._seconds:
            return None
        self._t, self._seconds = t, outlook.seconds
        return outlook


_ADVICE = {
    "RAM": "Save now; `buoy why` tells the holders if it dies.",
    "VRAM": "Save now; keep numbers (`loss.item()`), not tensors.",
    "disk": "Delete old checkpoints, or save to another disk.",
    "shm": "Use fewer loader workers, or a larger /dev/shm.",
    "time": "Save a checkpoint before then.",
}


def sentence(outlook: Outlook) -> str:
    """The alarm as the one line that people see.

    >>> sentence(Outlook("RAM", 98, 127, seconds=850, per_step=2**20, at_step=31200))[:67]
    'RAM 98 B of 127 B (77 %), growing 1.0 MiB per step: full in about 1'
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_bytes, format_duration, format_share

    advice = _ADVICE.get(outlook.name, "Save now.")
    left = "n/a" if outlook.seconds is None else format_duration(_rounded(outlook.seconds))
    step = "" if outlook.at_step is None else f" (step ~{outlook.at_step})"
    if outlook.name == "time":
        used, limit = format_duration(_rounded(outlook.used)), format_duration(outlook.limit)
        share = f"{used} of {limit} ({100 * outlook.share:.0f} %)"
        return f"Session time {share} is used: it ends in about {left}{step}. {advice}"
    if outlook.per_step is not None:
        growth = f"{format_bytes(outlook.per_step)} per step"
    else:
        growth = f"{format_bytes(outlook.per_second)} per second"
    share = format_share(outlook.used, outlook.limit)
    return f"{outlook.name} {share}, growing {growth}: full in about {left}{step} if it goes on. {advice}"


def _rounded(seconds: float) -> float:
    """No more digits than a forecast deserves: whole minutes, below two of them tens of seconds."""
    if seconds >= 120:
        return round(seconds / 60) * 60
    return round(seconds / 10) * 10 if seconds >= 20 else round(seconds)


class _Window:
    """The growth within the last so many seconds."""

    __slots__ = ("cells", "even", "halves", "noise", "per_second", "per_step", "rise", "rises", "steady", "steps", "top")

    def __init__(self, cells: list[_Point], limit: float) -> None:
        self.cells = cells
        start, end = cells[0], cells[-1]
        span = end[0] - start[0]
        self.steps = end[1] - start[1]
        slope, noise, self.top = _line(cells, 0)
        self.per_second = slope
        self.per_step: float | None = None
        if self.steps >= _FEWEST_STEPS:
            per_step, step_noise, step_top = _line(cells, 1)
            if step_noise <= 1.25 * noise:
                half = cells[len(cells) // 2]
                pace = (end[1] - half[1]) / (end[0] - half[0])
                self.per_step, self.per_second = per_step, per_step * pace
                noise, self.top = step_noise, step_top
        axis = 0 if self.per_step is None else 1
        x_span = end[axis] - start[axis]
        whole = slope if self.per_step is None else self.per_step
        self.rise = whole * x_span
        self.rises = self.rise > max(4 * noise, 0.01 * limit)
        self.noise = noise
        middle = len(cells) // 2
        early, early_noise, _ = _line(cells[: middle + 1], axis)
        late, late_noise, _ = _line(cells[middle:], axis)
        slack = 0.3 * abs(self.rise) + 3 * max(noise, early_noise, late_noise)
        self.steady = abs(late - early) * x_span / 2 <= slack / 2 and span > 0
        self.halves = (early * x_span / 2, late * x_span / 2)
        self.even = self._is_even()

    def _is_even(self) -> bool:
        """Whether the rise is spread over the window, rather than done in a few jumps."""
        peaks = _running_max(self.cells)
        total = peaks[-1] - peaks[0]
        jumps = sorted((b - a for a, b in pairwise(peaks)), reverse=True)
        return total > 0 and jumps[0] <= 0.4 * total and sum(jumps[:2]) <= 0.6 * total and sum(jumps[:3]) <= 0.8 * total

    def flattens(self, limit: float, tolerance: float = 0.3) -> bool:
        """Whether the growth may bend towards a plateau below the limit (Aitken's delta squared)."""
        levels = _running_max(self.cells)
        if levels[-1] - levels[0] < 0.01 * limit:
            return False
        axis = 0 if self.per_step is None else 1
        start, end = self.cells[0][axis], self.cells[-1][axis]
        marks = [_level_at(self.cells, axis, start + (end - start) * part / 3) for part in (1, 2, 3)]
        before, after = marks[1] - marks[0], marks[2] - marks[1]
        return self._bends(before, after, limit, tolerance) or (self.steady and self._bends(*self.halves, limit, tolerance))

    def _bends(self, before: float, after: float, limit: float, tolerance: float) -> bool:
        before, after = before + tolerance * self.noise, after - tolerance * self.noise
        if before <= 0 or after >= before:
            return False
        ratio = max(0.0, after / before)
        plateau = self.cells[-1][2] + after * ratio / (1 - ratio)
        return ratio < K2 or plateau < K3 * limit

    def new_ground(self, points: list[_Point]) -> bool:
        """Whether the window rises above all that was reached before it."""
        start = self.cells[0][0]
        before = max((used for t, _, used in points if t <= start), default=0.0)
        return self.top - before >= 0.5 * self.rise


def _window(points: list[_Point], since: float, limit: float) -> _Window | None:
    """The points since then, at most `_CELLS` of them: the highest of each equal stretch of time."""
    width = (points[-1][0] - since) / _CELLS
    cells: list[_Point] = []
    last = -1
    for point in points:
        if point[0] < since:
            continue
        cell = int((point[0] - since) / width) if width > 0 else 0
        if cell == last and cells:
            if point[2] > cells[-1][2]:
                cells[-1] = point
        else:
            cells.append(point)
            last = cell
    return _Window(cells, limit) if len(cells) >= _FEWEST_POINTS else None


def _line(cells: list[_Point], axis: int) -> tuple[float, float, float]:
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


def _level_at(cells: list[_Point], axis: int, x: float) -> float:
    """The level about x: the median of the three cells nearest to it."""
    nearest = sorted(cells, key=lambda cell: abs(cell[axis] - x))[:3]
    return _median([cell[2] for cell in nearest])


def _running_max(cells: list[_Point]) -> list[float]:
    peaks = []
    peak = -inf
    for cell in cells:
        peak = max(peak, cell[2])
        peaks.append(peak)
    return peaks


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
