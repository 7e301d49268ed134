"""Does RAM stand at its limit? Said from the level and the time alone: a training may never come to its first step.

A forecast needs growth, and a hang needs a process that does nothing. A cache that has filled the session grows no more
and computes: it stands there, until a little more is asked for and the kernel kills it.

- **High** is less than 5 % of the limit left, and less than 2 GiB: many trainings live at 85 or 90 %. Files that the
  kernel can drop are not counted as used. It ends at twice as much room, so that a value near the line is one stay.
- Said once after ten seconds. Again only where no step comes: after five minutes without one, then after ten, twenty.
- Memory that others fill is not this training's: it must hold a quarter of the limit itself.
"""

from __future__ import annotations

_LEAST_SHARE, _LEAST_ROOM = 0.05, 2 << 30
_LEAVE = 2.0
_OWN_SHARE = 0.25
_FIRST, _AGAIN = 10.0, 300.0
_AFTER_FORECAST = 60.0
"""Seconds in which a forecast of the same memory has said enough."""
_LONGEST_GAP = 5.0
"""Seconds between two samples beyond which the watcher itself was not running."""
_MARKED = ("eval", "checkpoint", "done")


def is_high(used: float, limit: float, factor: float = 1.0) -> bool:
    """Whether so little is left that the next large thing is the last; `factor`: of that little."""
    return limit - used < factor * min(_LEAST_SHARE * limit, _LEAST_ROOM)


class Level:
    """RAM that stands at its limit, worth a warning."""

    __slots__ = ("limit", "own", "seconds", "share", "step", "used", "without_step")

    def __init__(
        self, used: float, limit: float, own: float, seconds: float, step: int, without_step: float
    ) -> None:
        self.used = used
        self.limit = limit
        self.share = used / limit
        self.own = own
        """Bytes of the training's own processes."""
        self.seconds = seconds
        """How long it has stood there."""
        self.step = step
        self.without_step = without_step
        """Seconds of those since the last step."""

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


class LevelWatch:
    """Watches RAM, fed about once a second."""

    def __init__(self) -> None:
        self._t: float | None = None
        self._stay: float | None = None
        """Seconds for which it has been high; None while it is not."""
        self._quiet = 0.0
        """Seconds for which nothing is said of it."""
        self._step = 0
        self._without_step = 0.0
        self._pause: float | None = None
        """Seconds without a step before it is said again; None before the first time."""

    def forecast_told(self) -> None:
        """The growth of this memory was just warned of."""
        self._quiet = _AFTER_FORECAST

    def feed(
        self,
        t: float,
        used: float | None,
        limit: float | None,
        own: float | None,
        step: int | None,
        phase: str | None,
    ) -> Level | None:
        """One reading; a level that is to be warned of, mostly None."""
        gap = 0.0 if self._t is None else t - self._t
        self._t = t
        if not 0 <= gap <= _LONGEST_GAP or used is None or not limit:
            return None
        self._quiet = max(0.0, self._quiet - gap)
        if not self._is_staying(used, limit, own or 0.0, gap):
            return None
        steps = step or 0
        is_waiting = steps == self._step and phase not in _MARKED
        self._without_step = self._without_step + gap if is_waiting else 0.0
        self._step = steps
        return self._told(Level(used, limit, own or 0.0, self._stay or 0.0, steps, self._without_step))

    def _is_staying(self, used: float, limit: float, own: float, gap: float) -> bool:
        if self._stay is not None and is_high(used, limit, _LEAVE):
            self._stay += gap
        else:
            self._stay = 0.0 if is_high(used, limit) and own >= _OWN_SHARE * limit else None
            self._without_step = 0.0
        return self._stay is not None

    def _told(self, level: Level) -> Level | None:
        if self._quiet or not is_high(level.used, level.limit):
            return None
        is_due = level.seconds >= _FIRST if self._pause is None else level.without_step >= self._pause
        if not is_due:
            return None
        self._pause = _AGAIN if self._pause is None else 2 * self._pause
        return level


def sentence(level: Level) -> str:
    """The alarm as the one line that a user sees.

    >>> gib = 2**30
    >>> sentence(Level(12.5 * gib, 12.7 * gib, 12 * gib, 540.0, 0, 540.0))[:97]
    'RAM has been at 12.5 GiB of 12.7 GiB (98 %) for 9 min and no step is done: it is killed when full'
    """
    # Imported here: most sidecars never warn, and this import would be a tenth of their memory.
    from buoy.units import format_duration, format_share

    place = ""
    if not level.step:
        place = " and no step is done"
    elif level.without_step >= _AGAIN:
        place = f", with no step since step {level.step}"
    advice = (
        "Save now."
        if level.step
        else "Load less at once: smaller caches and shuffle buffers, data in pieces."
    )
    return (
        f"RAM has been at {format_share(level.used, level.limit)} for {format_duration(round(level.seconds))}{place}: "
        f"it is killed when full. {advice}"
    )
