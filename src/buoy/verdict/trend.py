"""How memory moved before the end: steadily, by the step or by the second, or all at once."""

from __future__ import annotations

from buoy.verdict.evidence import Evidence
from buoy.verdict.values import count, number

_FEWEST_STEPS = 8
_FEWEST_SECONDS = 0.5
_STANDSTILL = 3.0
"""Seconds: who no longer grew for so long before the end did not die of growing."""
_FEWEST_ROWS = 8
_LEAST_RISE = 0.05
"""Of the limit: a smaller rise is noise."""
_ALIKE = 2.0
"""Two halves whose growth differs by more than this factor have no growth in common."""

_Rows = list[tuple[float, int]]


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
    """The slope of the later two thirds, which warm-up has left behind, if both halves of them grew alike."""
    if not limit or not rows:
        return None
    begin = rows[0][0] + (rows[-1][0] - rows[0][0]) / 3
    rows = [row for row in rows if row[0] >= begin]
    if len(rows) < _FEWEST_ROWS or rows[-1][0] - rows[0][0] < least:
        return None
    middle = (rows[0][0] + rows[-1][0]) / 2
    early = _slope([row for row in rows if row[0] <= middle])
    late = _slope([row for row in rows if row[0] >= middle])
    if early is None or late is None or min(early, late) <= 0 or max(early, late) > _ALIKE * min(early, late):
        return None
    return _slope(rows) if rows[-1][1] - rows[0][1] >= _LEAST_RISE * limit else None


def _slope(rows: _Rows) -> float | None:
    """Least squares; None when all are at one place."""
    if not rows:
        return None
    mean_x = sum(x for x, _ in rows) / len(rows)
    mean_y = sum(y for _, y in rows) / len(rows)
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    return sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread if spread > 0 else None
