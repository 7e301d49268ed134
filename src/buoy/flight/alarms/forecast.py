"""When will a resource run out? A leak is reported with its time left; a warm-up is left in peace.

A series (RAM, VRAM, disk, shm) is kept as a history that fades: fine where it is recent, coarser with age,
so that a leak of ten seconds and one of ten hours are judged by the same rules at the same cost. The growth
is fitted per step and turned into seconds by the recent pace of steps; without steps, or where the clock
explains the growth better, per second.

An alarm needs all of this, for a few fits in a row:
- training has begun, and the growth was seen over enough samples and steps;
- it rises well above the noise, in every quarter of the window, and not in a few jumps (the first step,
  the first evaluation);
- it does not flatten: three points in a row (Aitken) do not lead to a plateau below the limit;
- it breaks new ground: what falls and comes back (garbage collection, epochs, checkpoints) is no leak;
- what was seen is not stretched more than a few times over, and ends within the horizon.

Memory that grows need not be the training's: beside what is used in all, what its own processes hold is kept, and the
growth is called theirs only as far as they grew with it.

What cannot be told: a cache that fills in a straight line and then stops is a leak until it stops. It is
announced like one above half of the limit ("at this rate"), and the alarm ends with the growth. Where no
step has ever been counted, loading a data set looks just like that: there the alarm waits for 85 %.
A burst (most of the memory within a few seconds) is over before anything can be fitted.
"""

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


_ALARM_SHARE = 0.5
_ALARM_SHARE_WITHOUT_STEPS = 0.85
_HORIZON = 1800.0
_STRETCH = 4.0
"""The growth seen is extrapolated to at most so many times its size."""
_FITS_IN_A_ROW = 3
_LONGEST_PAUSE = 10.0
"""Seconds between two fits of a series that hardly moves."""
_OWN_SHARE = 0.5
"""Of the growth in all, from which on it is the training's."""


class Outlook:
    """What is to be expected of one resource. Unknown is None: no growth means no `seconds`."""

    __slots__ = (
        "alarm",
        "at_step",
        "limit",
        "name",
        "per_second",
        "per_step",
        "seconds",
        "share",
        "used",
        "whose",
    )

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
        """Seconds to exhaustion, if the growth continues."""
        self.per_step = per_step
        self.per_second = per_second
        self.at_step = at_step
        """The step at which it will be full."""
        self.alarm = alarm
        self.whose: str | None = None
        """`training` or `others`: who grows; None where that is not known, or nobody does."""

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
        self._history = History()
        self._own = History()
        self._first_step = 0
        self._last: Point | None = None
        self._fitted_t = -inf
        self._fitted_used = 0.0
        self._outlook: Outlook | None = None
        self._streak = 0
        self._reminder = _Reminder()

    def feed(self, t: float, step: int | None, used: float | None, own: float | None = None) -> None:
        """One reading: monotonic seconds, steps done (None or 0: none yet), bytes used, and by the training itself."""
        if used is None:
            return
        steps = step or 0
        if (self._first_step == 0 and steps > 0) or steps < self._first_step:
            # The first step ends the warm-up; a counter that went back is a new training.
            self._first_step = steps
            self._history, self._own = History(), History()
            self._streak = 0
        self._last = (t, float(steps), float(used))
        self._history.add(self._last)
        if own is not None:
            self._own.add((t, float(steps), float(own)))

    def exhaustion(self) -> Outlook | None:
        """The outlook as of the last reading; None without a reading or a limit."""
        if self._last is None or not self.limit:
            return None
        t, _, used = self._last
        pause = min(_LONGEST_PAUSE, max(0.5, (t - self._history.start()) / 50))
        moved = abs(used - self._fitted_used) > 0.02 * self.limit
        if self._outlook is None or t - self._fitted_t >= (0.5 if moved else pause):
            self._outlook = self._judge()
            self._fitted_t = t
            self._fitted_used = used
        return self._outlook

    def news(self) -> Outlook | None:
        """The outlook when it should be reported: a new alarm, or one whose time left has halved since."""
        return self._reminder.due(self._last[0], self.exhaustion()) if self._last else None

    def _judge(self) -> Outlook:
        assert self._last is not None and self.limit
        now, step, used = self._last
        outlook = Outlook(self.name, used, self.limit)
        points = self._history.points()
        growth, flattens = _longest_steady_growth(points, now, self.limit)
        if growth is None:
            self._streak = 0
            return outlook
        room = max(0.0, self.limit - growth.top)
        outlook.per_second = growth.per_second
        outlook.seconds = room / growth.per_second
        if growth.per_step is not None:
            outlook.per_step = growth.per_step
            outlook.at_step = int(step + room / growth.per_step)
        leaking = (
            outlook.share >= (_ALARM_SHARE if self._first_step else _ALARM_SHARE_WITHOUT_STEPS)
            and outlook.seconds <= self.horizon
            and room <= _STRETCH * growth.rise
            and not flattens
            and growth.is_clear
            and growth.steady
            and growth.is_even()
            and growth.goes_on()
            and growth.breaks_new_ground(points)
            and (growth.enough_steps or not self._first_step)
        )
        self._streak = self._streak + 1 if leaking else 0
        outlook.alarm = self._streak >= _FITS_IN_A_ROW
        if leaking:
            self._attribute(outlook, growth)
        return outlook

    def _attribute(self, outlook: Outlook, growth: Growth) -> None:
        """Whose growth it is: what others took is no growth by the step, and no leak of the training."""
        points = self._own.points()
        if not points or points[-1][0] < growth.since:
            return
        assert self.limit
        own = growth_since(points, growth.since, self.limit)
        if own is None or own.rise < _OWN_SHARE * growth.rise:
            outlook.whose = "others"
            outlook.per_step = outlook.at_step = None
            return
        outlook.whose = "training"
        if own.per_step is not None and outlook.per_step is not None:
            outlook.per_step = min(own.per_step, outlook.per_step)


def _longest_steady_growth(points: list[Point], now: float, limit: float) -> tuple[Growth | None, bool]:
    """The growth to go by, and whether it, or a longer view of it, flattens towards a plateau.

    Windows are halved until the growth within is steady: a leak that began late is seen from where it began.
    """
    best: Growth | None = None
    flattens = False
    length = now - points[0][0]
    while length > 0 and (best is None or not best.steady):
        growth = growth_since(points, now - length, limit)
        if growth is None:
            break
        flattens = flattens or growth.flattens(limit)
        if growth.rises:
            best = growth
        length /= 2
    return best, flattens


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
        """The outlook when it should be reported: at the first alarm, and whenever the time left has halved."""
        return self._reminder.due(self._elapsed, self.exhaustion())


class _Reminder:
    """Decides when an alarm is repeated: at most once a minute, and only once the time left has halved."""

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


_OTHERS = "Other programs are growing, not the training: see `ps aux --sort -rss`."
ADVICE = {
    "RAM": "Save now.",  # and the variables that hold it are named in the next line
    "VRAM": "Save now; keep numbers (`loss.item()`), not tensors.",
    "disk": "Delete old checkpoints, or save to another disk.",
    "shm": "Use fewer loader workers, or a larger /dev/shm.",
    "time": "Save a checkpoint before then.",
}


def sentence(outlook: Outlook) -> str:
    """The alarm as the one line that users see.

    >>> sentence(Outlook("RAM", 98, 127, seconds=850, per_step=2**20, at_step=31200))[:67]
    'RAM 98 B of 127 B (77 %), growing 1.0 MiB per step: full in about 1'
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_bytes, format_duration, format_share

    advice = _OTHERS if outlook.whose == "others" else ADVICE.get(outlook.name, "Save now.")
    left = "n/a" if outlook.seconds is None else format_duration(_rounded(outlook.seconds))
    step = "" if outlook.at_step is None else f" (step ~{outlook.at_step})"
    if outlook.name == "time":
        used, limit = format_duration(_rounded(outlook.used)), format_duration(outlook.limit)
        share = f"{used} of {limit} ({100 * outlook.share:.0f} %)"
        if not outlook.seconds:
            return f"Session time {share}: the limit has passed, it may end at any moment. Save a checkpoint now."
        return f"Session time {share} is used: it ends in about {left}{step}. {advice}"
    if outlook.per_step is not None:
        growth = f"{format_bytes(outlook.per_step)} per step"
    else:
        growth = f"{format_bytes(outlook.per_second)} per second"
    share = format_share(outlook.used, outlook.limit)
    return f"{outlook.name} {share}, growing {growth}: full in about {left}{step} at this rate. {advice}"


def _rounded(seconds: float) -> float:
    """No more digits than a forecast deserves: whole minutes, below two of them tens of seconds."""
    if seconds >= 120:
        return round(seconds / 60) * 60
    return round(seconds / 10) * 10 if seconds >= 20 else round(seconds)
