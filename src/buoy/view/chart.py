"""What was measured, attempt after attempt on one axis: still pictures (SVG), and numbers for the page's script."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from os.path import basename
from typing import Any

from buoy.fields import number
from buoy.units import format_bytes, format_duration
from buoy.view import history as changes
from buoy.view.cards import WELL
from buoy.view.history import History, Life, Point, without_places

WIDTH, HEIGHT = 1000, 150
_TOP, _BOTTOM = 6, 4

_HEADROOM = 1.08
_NEAR = 0.2
"""A limit is drawn when the curve came to this share of it; in words it is always given."""
_EVEN = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
_MIB = 1048576.0
"""Bytes go into the page as MiB: five digits instead of eleven."""

Band = list[tuple[float, float] | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A title, its values by bucket, and the limit they run against."""

    id: str
    title: str
    unit: str
    values: Band
    limit: float | None
    limit_words: str

    @property
    def shows_limit(self) -> bool:
        """Whether the limit is drawn."""
        return self.limit is not None and self.limit <= self.top

    @property
    def top(self) -> float:
        """The highest value the picture has room for."""
        highest = max((high for item in self.values if item for high in item), default=0.0)
        # Against a limit that is far away the curve would lie on the floor, and say nothing.
        if self.limit is not None and highest > _NEAR * self.limit:
            return max(highest, self.limit) * _HEADROOM
        return even(highest, self.unit) * _HEADROOM


def even(value: float, unit: str) -> float:
    """A little more than the value, such that it and its half are easy to read.

    >>> even(0.286, "seconds"), even(95.0, "seconds")
    (0.3, 120.0)
    >>> even(880 * 2**20, "bytes") / 2**20
    1000.0
    """
    if value <= 0:
        return 1.0
    whole = 1
    for larger in (1024**n for n in range(1, 6)) if unit == "bytes" else (60, 3600, 86400):
        whole = larger if value >= larger else whole
    power = 10.0 ** math.floor(math.log10(value / whole))
    step = next(step for step in _EVEN if step * power * whole >= value * (1 - 1e-9))
    return float(f"{step * power:.6g}") * whole


def charts(axis: Axis) -> list[Chart]:
    """The quantities of which anything was measured."""
    limits = _limits(axis)
    wanted = [
        ("memory", "Memory", "bytes", limits["memory"], "limit"),
        ("gpu", "GPU memory", "bytes", limits["gpu"], "limit"),
        ("step_seconds", "Time per step", "seconds", None, ""),
        ("disk_free", "Free disk", "bytes", None, ""),
        ("shm_free", "Free shared memory", "bytes", None, ""),
    ]
    made = [
        Chart(name, title, unit, band(axis, name), limit, words) for name, title, unit, limit, words in wanted
    ]
    return [chart for chart in made if any(chart.values) and not _is_dull(chart)]


def _is_dull(chart: Chart) -> bool:
    """Free shared memory that never moves says nothing."""
    if chart.id != "shm_free":
        return False
    lows = [item[0] for item in chart.values if item]
    return max(lows) - min(lows) < 0.01 * max(lows)


def _limits(axis: Axis) -> dict[str, float | None]:
    found: dict[str, float | None] = {"memory": None, "gpu": None}
    for stretch in axis.stretches:
        life = stretch.life
        if (ram := number(life.limits.get("ram"))) is not None:
            found["memory"] = ram
        if life.gpus:
            found["gpu"] = number(life.gpus[0].get("total"))
    return found


def words(unit: str) -> Callable[[float], str]:
    """How a value of this unit is written."""
    return format_bytes if unit == "bytes" else format_duration


def svg(chart: Chart, axis: Axis, marks: list[dict[str, Any]]) -> str:
    """The picture: a band from lowest to highest, the limit, and what happened."""
    scale = _Scale(axis.buckets, chart.top)
    parts = [
        f'<svg class="chart" data-chart="{chart.id}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{html.escape(chart.title)}"><g>',
        *(
            f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y * HEIGHT / 100:.1f}" y2="{y * HEIGHT / 100:.1f}"/>'
            for y, _ in ticks(chart)
        ),
        *_lives(axis, scale),
        f'<path class="band" d="{_outline(chart.values, scale)}"/>',
    ]
    if chart.limit is not None and chart.shows_limit:
        y = scale.y(chart.limit)
        parts.append(f'<line class="limit" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
    for mark in marks:
        x = scale.x(mark["x"] + 0.5)
        title = html.escape(f"{mark['text']} ({format_duration(mark['at'])})", quote=True)
        y1 = HEIGHT - _BOTTOM - 14 if mark["kind"] == "save" else _TOP
        parts.append(
            f'<line class="mark {mark["kind"]}" x1="{x}" x2="{x}" y1="{y1}" y2="{HEIGHT - _BOTTOM}">'
            f"<title>{title}</title></line>"
        )
    return "".join([*parts, "</g></svg>"])


class _Scale:
    def __init__(self, buckets: int, top: float) -> None:
        self._wide = WIDTH / buckets
        self._high = (HEIGHT - _TOP - _BOTTOM) / top

    def x(self, bucket: float) -> float:
        return round(bucket * self._wide, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - value * self._high, 1)


def ticks(chart: Chart) -> list[tuple[float, str]]:
    """Where (per cent from the top) a value is written beside the picture: words inside it would be stretched."""
    scale = _Scale(1, chart.top)
    found: list[tuple[float, str]] = []
    for share in (1.0, 0.5, 0.0):
        value = share * chart.top / _HEADROOM
        label = words(chart.unit)(value) if value else "0"
        if label not in {text for _, text in found}:
            found.append((round(100 * scale.y(value) / HEIGHT, 1), label))
    return found


def _lives(axis: Axis, scale: _Scale) -> list[str]:
    parts = []
    for before, after in zip(axis.stretches, axis.stretches[1:], strict=False):
        x = scale.x((before.first + before.count + after.first) / 2)
        parts.append(f'<line class="life" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
    return parts


def _outline(values: Band, scale: _Scale) -> str:
    """Closed outlines, one per stretch without a hole: along the highest values and back along the lowest."""
    path: list[str] = []
    run: list[tuple[int, float, float]] = []
    for index, item in enumerate([*values, None]):
        if item is not None:
            run.append((index, *item))
            continue
        if run:
            forth = _corners([(scale.x(x + 0.5), scale.y(high)) for x, _, high in run])
            # A pixel of thickness at least: a line that never moves must still be seen.
            back = _corners([(scale.x(x + 0.5), scale.y(low) + 1.2) for x, low, _ in reversed(run)])
            first, last = scale.x(run[0][0]), scale.x(run[-1][0] + 1)
            forth = [(first, forth[0][1]), *forth, (last, forth[-1][1])]
            back = [(last, back[0][1]), *back, (first, back[-1][1])]
            path.append("M" + "L".join(f"{x:g} {y:.4g}" for x, y in forth + back) + "Z")
            run = []
    return "".join(path)


def _corners(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the points in the middle of a level stretch."""
    kept = [
        point
        for before, point, after in zip(points, points[1:], points[2:], strict=False)
        if not before[1] == point[1] == after[1]
    ]
    return [points[0], *kept, points[-1]]


def numbers(chart: Chart) -> dict[str, Any]:
    """The same values for the page's script, rounded to what can be seen."""
    size = _MIB if chart.unit == "bytes" else 1.0
    return {
        "id": chart.id,
        "title": chart.title,
        "unit": chart.unit,
        "scale": size,
        "limit": chart.limit,
        "low": [None if item is None else _rounded(item[0] / size) for item in chart.values],
        "high": [None if item is None else _rounded(item[1] / size) for item in chart.values],
    }


def _rounded(value: float) -> float | int:
    short = float(f"{value:.4g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


BUCKETS = 800
_LEAST_PER_LIFE = 16
_GAP = 3
MOST_LIVES = 30
"""More restarts than this are drawn from the newest back; the page says so."""
TAIL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """The buckets one life covers, and the seconds (since that life began) they stand for."""

    life: Life
    first: int
    count: int
    begin: float
    seconds: float

    def bucket(self, moment: float) -> int | None:
        """The bucket of a moment of this life; None outside."""
        if not self.begin <= moment <= self.begin + self.seconds:
            return None
        share = (moment - self.begin) / self.seconds if self.seconds else 1.0
        return self.first + min(self.count - 1, int(share * self.count))


@dataclass(frozen=True, slots=True)
class Axis:
    """Where each life lies."""

    stretches: list[Stretch]
    buckets: int


def whole(history: History) -> Axis:
    """All lives (the newest thirty) one after the other; what lies between two of them takes no room."""
    lives = history.lives[-MOST_LIVES:]
    total = sum(life.seconds for life in lives)
    stretches, first = [], 0
    room = BUCKETS - len(lives) * (_LEAST_PER_LIFE + _GAP)
    for life in lives:
        count = _LEAST_PER_LIFE + (int(room * life.seconds / total) if total else 0)
        stretches.append(Stretch(life, first, count, 0.0, life.seconds))
        first += count + _GAP
    return Axis(stretches, max(1, first - _GAP))


def tail(history: History) -> Axis | None:
    """The last ten minutes of the last life, as finely as they were measured; None when the whole is no coarser."""
    if not history.lives or sum(life.seconds for life in history.lives) < 3 * TAIL_SECONDS:
        return None
    life = history.lives[-1]
    begin = max(0.0, life.seconds - TAIL_SECONDS)
    return Axis([Stretch(life, 0, BUCKETS, begin, life.seconds - begin)], BUCKETS)


def band(axis: Axis, name: str) -> list[tuple[float, float] | None]:
    """The lowest and highest value of a series in each bucket; None where nothing was measured."""
    result: list[tuple[float, float] | None] = [None] * axis.buckets
    for stretch in axis.stretches:
        points = stretch.life.series.get(name, [])
        for moment, low, high in points:
            index = stretch.bucket(moment)
            if index is None:
                continue
            known = result[index]
            result[index] = (low, high) if known is None else (min(known[0], low), max(known[1], high))
        _bridge(result, stretch, points)
    return result


def _bridge(result: list[tuple[float, float] | None], stretch: Stretch, points: list[Point]) -> None:
    """Between two readings closer than 150 s nothing is missing: minutes are coarser than buckets at times."""
    last: tuple[int, float, tuple[float, float]] | None = None
    for moment, low, high in points:
        index = stretch.bucket(moment)
        if index is None:
            continue
        if last is not None and index - last[0] > 1 and moment - last[1] < 150.0:
            for empty in range(last[0] + 1, index):
                result[empty] = last[2]
        last = (index, moment, (low, high))


def marks(axis: Axis) -> list[dict[str, Any]]:
    """What happened, by bucket: checkpoints, warnings, hangs, deaths of processes, the end of each life."""
    found: list[dict[str, Any]] = []
    for stretch in axis.stretches:
        life = stretch.life
        said = [(_words(event), life.since_start(event)) for event in life.events]
        if life.cause is not None:
            kind = "end" if life.cause in WELL else "death"
            said.append(((kind, life.cause), stretch.begin + stretch.seconds))
        for words, moment in said:
            index = stretch.bucket(moment) if words is not None and moment is not None else None
            if words is not None and index is not None:
                kind, text = words[0], without_places(words[1], life.about)
                found.append({"x": index, "kind": kind, "text": text, "at": moment, "attempt": life.number})
    return _thinned(found)


def _words(event: dict[str, Any]) -> tuple[str, str] | None:
    kind = event.get("kind")
    if kind == "save":
        step = event.get("step")
        of = f"{event['of']}: " if event.get("of") else ""
        return (
            "save",
            f"{of}checkpoint at step {step}" if step is not None else f"saved by {event.get('what')}",
        )
    if kind == "warning":
        return "warning", str(event.get("text", event.get("alarm", "warning")))
    if kind == "process-death":
        return "warning", f"a process died: {event.get('name')}"
    if kind == "disk":
        return "adapted", f"the free disk is from here on that of {basename(str(event.get('path')))}"
    text = changes.words(event)
    return ("adapted", text) if text is not None else None


def _thinned(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One mark of a kind per bucket is what can be seen; the newest says it, with how many there were."""
    by_place: dict[tuple[int, str], dict[str, Any]] = {}
    for mark in found:
        key = (mark["x"], mark["kind"])
        before = by_place.get(key)
        mark["count"] = 1 if before is None else before["count"] + 1
        by_place[key] = mark
    return sorted(by_place.values(), key=lambda mark: mark["x"])
