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

from math import inf

from buoy.flight.alarms.growth import Growth, History, Point, growth_since

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
