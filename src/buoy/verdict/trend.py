"""How memory moved before the end: step by step, or all at once."""

from __future__ import annotations

from buoy.verdict.evidence import Evidence
from buoy.verdict.values import count

_FEWEST_STEPS = 8
_LEAST_RISE = 0.05
"""Of the limit: a smaller rise is noise."""


def bytes_per_step(evidence: Evidence, limit: int | None) -> float | None:
    """Growth for each step over the last samples, if it is steady: both halves of them grew alike."""
    rows = [
        (step, used)
        for sample in evidence.samples
        if (step := count(sample.get("step"))) and (used := count(sample.get("tree_rss")))
    ]
    if not limit or len(rows) < 6 or rows[-1][0] - rows[0][0] < _FEWEST_STEPS:
        return None
    middle_step = (rows[0][0] + rows[-1][0]) / 2
    middle = min(rows, key=lambda row: abs(row[0] - middle_step))
    early, late = _slope(rows[0], middle), _slope(middle, rows[-1])
    if early is None or late is None or min(early, late) <= 0 or max(early, late) > 3 * min(early, late):
        return None
    rise = rows[-1][1] - rows[0][1]
    return _slope(rows[0], rows[-1]) if rise >= _LEAST_RISE * limit else None


def _slope(first: tuple[int, int], last: tuple[int, int]) -> float | None:
    steps = last[0] - first[0]
    return (last[1] - first[1]) / steps if steps > 0 else None
