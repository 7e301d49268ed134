"""How memory moved before the end: steadily, by the step or by the second, or all at once."""

from __future__ import annotations

import os
from math import inf
from typing import NamedTuple

from buoy.fields import count, mapping, number
from buoy.machine.files import parse_json, read_bounded
from buoy.units import format_bytes, format_duration, format_share
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Reading

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
_MOST_BYTES = 8 << 20
_MOST_ROWS = 600
"""Of the samples at full rate: ten minutes are ten times as many, and parsing them would delay the verdict."""
_PEAKS = 60
"""Of more rows than twice this the highest of each of so many stretches count: memory rises and falls within a step."""

_Rows = list[tuple[float, int]]


class Growth(NamedTuple):
    """How fast memory grew: by the step where steps explain it, else by the second."""

    amount: float
    is_by_step: bool
    warned: Reading | None = None
    """The warning that announced it, where it is known from that."""

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


def growth_of_others(evidence: Evidence) -> float | None:
    """Bytes a second by which other processes than the training's grew, if the last warning said that of the end."""
    values = _last_warning(evidence, "ram")
    return number(values.get("per_second")) if values.get("whose") == "others" else None


def foretold(evidence: Evidence, alarm: str) -> Growth | None:
    """The training's own growth, by the last warning that this would be full, if the end came about when it said."""
    values = _last_warning(evidence, alarm)
    left, used, limit = number(values.get("seconds")), number(values.get("used")), number(values.get("limit"))
    by_step, by_second = number(values.get("per_step")), number(values.get("per_second"))
    amount = by_step if by_step is not None else by_second
    age = number(values.get("age"))
    if values.get("whose") == "others" or amount is None or amount <= 0:
        return None
    if used is None or limit is None or age is None:
        return None
    found = Growth(amount, by_step is not None)
    words = (
        f"warned {format_duration(age)} before: {format_share(int(used), int(limit))} in use, growing {found}, "
        f"full in about {format_duration(left)}"
    )
    return found._replace(warned=Reading(words, "events.jsonl", number(values.get("wall"))))


def _last_warning(evidence: Evidence, alarm: str) -> dict[str, object]:
    """The values of the last warning, with its `age` and `wall`; empty if the end did not come about when it said."""
    events = [event for event in evidence.events_of("warning") if event.get("alarm") == alarm]
    event = events[-1] if events else {}
    values, t, end = mapping(event.get("values")), number(event.get("t")), evidence.last_t
    left = number(values.get("seconds"))
    if t is None or end is None or left is None or not 0 <= end - t <= _LATE * left + _LATE_SECONDS:
        return {}
    return {**values, "age": end - t, "wall": event.get("wall")}


def bytes_per_step(evidence: Evidence, limit: int | None) -> float | None:
    """Growth for each step, if it is steady over the later part of the attempt."""
    rows = [(float(step), used) for _, step, used in _readings(evidence.folder) if step]
    return _growth(_peaks(rows), limit, _FEWEST_STEPS)


def bytes_per_second(evidence: Evidence, limit: int | None) -> float | None:
    """Growth for each second over the later samples, if it is steady: for programs whose steps nobody counts."""
    rows = [(t, used) for t, _, used in _readings(evidence.folder)]
    return _growth(_until_full(_peaks(rows)), limit, _FEWEST_SECONDS)


def _readings(folder: str) -> list[tuple[float, int, int]]:
    """Seconds, steps, and what the training held: by the minute for the whole attempt, and the last minutes finely."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("samples-"))
    except OSError:
        return []
    fine = [row for name in names for row in _table(os.path.join(folder, name), _MOST_ROWS // len(names))]
    coarse = []
    for row in _table(os.path.join(folder, "minutes.jsonl"), _MOST_ROWS):
        t, step, used = (row.get(name) for name in ("t", "step", "tree_rss"))
        if isinstance(t, list) and isinstance(used, list) and len(t) == len(used) == 3:
            last = step[2] if isinstance(step, list) and len(step) == 3 else 0
            coarse.append({"t": t[2], "step": last, "tree_rss": used[1]})
    first = min((t for row in fine if (t := number(row.get("t"))) is not None), default=inf)
    rows = [row for row in coarse if (number(row.get("t")) or inf) < first] + fine
    return [
        (t, count(row.get("step")) or 0, used)
        for row in rows
        if (t := number(row.get("t"))) is not None and (used := count(row.get("tree_rss")))
    ]


def _table(path: str, most: int) -> list[dict[str, object]]:
    """So many rows of a file, evenly spread; the last ones among them."""
    try:
        lines = read_bounded(path, _MOST_BYTES).splitlines()
    except OSError:
        return []
    fields = mapping(_parsed(lines[0])).get("fields") if lines else None
    if not isinstance(fields, list):
        return []
    every = max(1, len(lines) // max(1, most))
    chosen = lines[1:][::-every][::-1]
    found = [row for row in map(_parsed, chosen) if isinstance(row, list) and len(row) == len(fields)]
    return [dict(zip(map(str, fields), row, strict=True)) for row in found]


def _parsed(line: bytes) -> object:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _peaks(rows: _Rows) -> _Rows:
    """The highest of each stretch, where there are many."""
    if len(rows) <= 2 * _PEAKS:
        return rows
    start, width = rows[0][0], (rows[-1][0] - rows[0][0]) / _PEAKS
    found: dict[int, tuple[float, int]] = {}
    for row in rows:
        place = int((row[0] - start) / width) if width > 0 else 0
        if place not in found or row[1] > found[place][1]:
            found[place] = row
    return list(found.values())


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
