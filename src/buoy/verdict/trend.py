"""How memory moved before the end: steadily, by the step or by the second, or all at once."""

from __future__ import annotations

from typing import NamedTuple

from buoy.units import format_bytes, format_duration, format_share
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Reading
from buoy.verdict.values import count, mapping, number

_FEWEST_STEPS = 8
_FEWEST_SECONDS = 0.5
_STANDSTILL = 3.0
"""Seconds: who no longer grew for so long before the end did not die of growing."""
_FEWEST_ROWS = 8
_WINDOWS = ((2 / 3, 2.0, 0.05), (1 / 3, 1.3, 0.2), (1 / 6, 1.3, 0.2))
"""The share of the samples that is looked at; the factor by which the growth of its two halves may differ and still be
one; the least rise, as a share of the limit: what is less is noise."""
_LATE, _LATE_SECONDS = 2.0, 30.0
"""A forecast has come true within so many times its time left, or so many seconds more."""

_Rows = list[tuple[float, int]]


class Growth(NamedTuple):
    """How fast memory grew: by the step where steps explain it, else by the second."""

    amount: float
    is_by_step: bool
    warned: Reading | None = None
    """The warning that told of it, where it is known from that."""

    def __str__(self) -> str:
        return f"about {format_bytes(self.amount)} {'with each step' if self.is_by_step else 'a second'}"


def growth_before_the_end(evidence: Evidence, limit: int | None) -> Growth | None:
    """The growth of RAM that the last samples agree on, else that the recorder had warned of."""
    is_by_step = bool(count(evidence.last_sample.get("step")))
    seen = bytes_per_step(evidence, limit) if is_by_step else bytes_per_second(evidence, limit)
    told = foretold(evidence, "ram")
    if seen is not None:
        return Growth(seen, is_by_step, told.warned if told is not None else None)
    return told


def foretold(evidence: Evidence, alarm: str) -> Growth | None:
    """The growth of the last warning that this would be full, if the end came about when it said."""
    events = [event for event in evidence.events_of("warning") if event.get("alarm") == alarm]
    event = events[-1] if events else {}
    values, t, end = mapping(event.get("values")), number(event.get("t")), evidence.last_t
    left, used, limit = number(values.get("seconds")), number(values.get("used")), number(values.get("limit"))
    if t is None or end is None or left is None or not 0 <= end - t <= _LATE * left + _LATE_SECONDS:
        return None
    by_step, by_second = number(values.get("per_step")), number(values.get("per_second"))
    amount = by_step if by_step is not None else by_second
    if amount is None or amount <= 0 or used is None or limit is None:
        return None
    found = Growth(amount, by_step is not None)
    words = (
        f"warned {format_duration(end - t)} before: {format_share(int(used), int(limit))} in use, growing {found}, "
        f"full in about {format_duration(left)}"
    )
    return found._replace(warned=Reading(words, "events.jsonl", number(event.get("wall"))))


def bytes_per_step(evidence: Evidence, limit: int | None) -> float | None:
    """Growth for each step over the later samples, if it is steady."""
    rows = [
        (float(step), used)
        for sample in evidence.samples
        if (step := count(sample.get("step"))) and (used := count(sample.get("tree_rss")))
    ]
    return _growth(rows, limit, _FEWEST_STEPS)


def bytes_per_second(evidence: Evidence, limit: int | None) -> float | None:
    """Growth for each second over the later samples, if it is steady: for programs whose steps nobody counts."""
    rows = [
        (t, used)
        for sample in evidence.samples
        if (t := number(sample.get("t"))) is not None and (used := count(sample.get("tree_rss")))
    ]
    return _growth(_until_full(rows), limit, _FEWEST_SECONDS)


def _until_full(rows: _Rows) -> _Rows:
    """Without the last moments, in which the kernel looks for memory and nothing grows any more."""
    top = max((used for _, used in rows), default=0)
    first_full = next((place for place, (_, used) in enumerate(rows) if used >= 0.99 * top), len(rows))
    growing = rows[: first_full + 1]
    return growing if growing and rows[-1][0] - growing[-1][0] <= _STANDSTILL else []


def _growth(rows: _Rows, limit: int | None, least: float) -> float | None:
    """The slope of the later two thirds, which warm-up has left behind, if both halves of them grew alike.

    Else that of a shorter end, by stricter rules: a leak that began late is seen from where it began.
    """
    if not limit or not rows:
        return None
    for share, alike, rise in _WINDOWS:
        begin = rows[-1][0] - (rows[-1][0] - rows[0][0]) * share
        found = _steady([row for row in rows if row[0] >= begin], least, alike, rise * limit)
        if found is not None:
            return found
    return None


def _steady(rows: _Rows, least: float, alike: float, rise: float) -> float | None:
    if len(rows) < _FEWEST_ROWS or rows[-1][0] - rows[0][0] < least or rows[-1][1] - rows[0][1] < rise:
        return None
    middle = (rows[0][0] + rows[-1][0]) / 2
    early = _slope([row for row in rows if row[0] <= middle])
    late = _slope([row for row in rows if row[0] >= middle])
    if early is None or late is None or min(early, late) <= 0 or max(early, late) > alike * min(early, late):
        return None
    return _slope(rows)


def _slope(rows: _Rows) -> float | None:
    """Least squares; None when all are at one place."""
    if not rows:
        return None
    mean_x = sum(x for x, _ in rows) / len(rows)
    mean_y = sum(y for _, y in rows) / len(rows)
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    return sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread if spread > 0 else None
