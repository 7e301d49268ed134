"""Lives side by side on one axis of buckets, each keeping its lowest and highest value: no spike is lost."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import basename
from typing import Any

from buoy.view import history as changes
from buoy.view.cards import WELL
from buoy.view.history import History, Life, Point, without_places

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
        if life.verdict is not None:
            cause = life.verdict.get("cause")
            name = str(cause.get("id", "ended")) if isinstance(cause, dict) else "ended"
            said.append((("end" if name in WELL else "death", name), stretch.begin + stretch.seconds))
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
