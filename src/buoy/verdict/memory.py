"""RAM before the end: how it grew, how long it stood at its limit, which variables held it, and what follows from that.

Whatever ended the training, a restart of the kernel or a user's Stop too: that memory had been full for minutes, and
that no step ever came, is what its user has to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from buoy.fields import count, mapping, number, text
from buoy.flight import holders
from buoy.flight.alarms.level import is_high
from buoy.flight.log import memory_use, parse_row, read_samples, read_table, sample_files
from buoy.text import printable
from buoy.units import format_bytes, format_duration, format_share
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Holder, Reading

_WINDOW = 600.0
_EVERY = 10
"""Of ten samples one is read: about one a second."""
_LONGEST_GAP = 5.0
_LEAST = 10.0
"""Seconds at the limit that are worth a word."""
_LATELY = 60.0
"""Seconds before the end: what was over by then is another story."""
_NAMED = 3
_WORTH = 0.15
"""Of the process's memory: advice is given about a variable that holds at least this much."""
_OLD = 600.0
"""Seconds after which an answer is about another time, unless memory has stood still since."""
_NOT_ADVISED = ("kernel-oom", "worker-killed", "memory-error")
"""Causes whose own advice is about memory."""


class Stand(NamedTuple):
    """RAM at its limit, in the last ten minutes of the record."""

    seconds: float
    of: float
    lowest: float
    highest: float
    """Shares of the limit while it was there."""
    limit: int
    had_step: bool
    """Whether a step came while it was there."""
    wall: float | None

    def words(self, step: int | None, lives: bool) -> str:
        """`RAM had been at 97 to 99 % of its limit of 12.7 GiB for 9 min of the last 10 min; ...`."""
        low, high = round(100 * self.lowest), round(100 * self.highest)
        share = f"{low} to {high} %" if low < high else f"{high} %"
        time = _roughly(self.seconds)
        if self.seconds < 0.98 * self.of:
            time += f" of the last {_roughly(self.of)}"
        steps = (
            ""
            if self.had_step
            else "; no step was counted in that time"
            if step
            else "; no step was ever counted"
        )
        verb = "has been" if lives else "had been"
        return f"RAM {verb} at {share} of its limit of {format_bytes(self.limit)} for {time}{steps}"


def _roughly(seconds: float) -> str:
    """Whole minutes; below two of them seconds."""
    return format_duration(60 * round(seconds / 60) if seconds >= 120 else round(seconds))


def with_memory(cause: Cause, evidence: Evidence) -> Cause:
    """The cause, with what is known of RAM that stood at its limit, and the advice that follows from that."""
    stand = standing(evidence) if cause.id != "clean-exit" else None
    if stand is None:
        return cause
    lives = not evidence.is_dead
    words = stand.words(count(evidence.last_sample.get("step")), lives)
    reading = Reading(words, "samples", stand.wall)
    advice = () if cause.id in _NOT_ADVISED else (_advice(evidence), *cause.next)
    if cause.id == "still-running":
        claim = replace(
            cause.claim,
            text=f"{cause.claim.text}. {words}",
            evidence=(*cause.claim.evidence, *_named(evidence)),
        )
        return replace(cause, claim=claim, next=advice)
    before = Claim(words, "certain", (reading,))
    return replace(cause, cascade=(before, *cause.cascade), next=advice or cause.next)


def standing(evidence: Evidence) -> Stand | None:
    """How RAM stood at its limit before the end, or until now; None where it was never warned of, or was over."""
    if not any(event.get("alarm") == "ram-level" for event in evidence.events_of("warning")):
        return None
    end = evidence.last_t
    rows = [row for row in _rows(evidence) if end is not None and row.t > end - _WINDOW]
    high = [row for row in rows if is_high(row.used, row.limit)]
    if end is None or not high or end - high[-1].t > _LATELY:
        return None
    seconds = sum(row.gap for row in high)
    if seconds < _LEAST:
        return None
    shares = [row.used / row.limit for row in high]
    return Stand(
        seconds, max(seconds, sum(row.gap for row in rows)), min(shares), max(shares), high[-1].limit,
        high[-1].step > high[0].step, high[-1].wall,
    )  # fmt: skip


class _Row(NamedTuple):
    t: float
    wall: float | None
    gap: float
    used: int
    limit: int
    step: int


def _rows(evidence: Evidence) -> Iterator[_Row]:
    total = count(mapping(evidence.attempt.get("limits")).get("ram"))
    before: float | None = None
    for sample in read_samples(evidence.folder, every=_EVERY):
        t = number(sample.get("t"))
        used, limit = memory_use(
            count(sample.get("cgroup_used")),
            count(sample.get("cgroup_limit")),
            count(sample.get("available")),
            total,
        )
        if t is None or used is None or not limit:
            continue
        gap = t - before if before is not None and 0 < t - before <= _LONGEST_GAP else 0.0
        before = t
        yield _Row(t, number(sample.get("wall")), gap, used, limit, count(sample.get("step")) or 0)


class _Answer(NamedTuple):
    """What the process said of its memory, and how many seconds before the end."""

    values: dict[str, Any]
    age: float
    wall: float | None


def _answer(evidence: Evidence) -> _Answer | None:
    """The last answer, if it still is about the end."""
    event, end = next(iter(reversed(evidence.events_of("holders"))), None), evidence.last_t
    t = number(event.get("t")) if event is not None else None
    if event is None or t is None or end is None:
        return None
    if end - t > _OLD and standing(evidence) is None:
        return None
    return _Answer(event, max(0.0, end - t), number(event.get("wall")))


def variables(evidence: Evidence, on_device: bool = False) -> list[Holder]:
    """The variables that held the most, as the process itself had said; else one that says why they are not known."""
    answer = _answer(evidence)
    if answer is None:
        return []
    age = format_duration(round(answer.age, 1))
    when = f"read {age} before the end" if evidence.is_dead else f"read {age} ago"
    if (error := text(answer.values.get("error"))) is not None:
        return [Holder("its variables", None, None, f"they could not be {when}: {printable(error, 120)}")]
    named = holders.large(answer.values, on_device)[:_NAMED]
    found = [Holder(printable(each["name"], 60), each["bytes"], None, _detail(each)) for each in named]
    if not on_device and (rest := holders.outside(answer.values)) is not None:
        words = rest.partition(" are ")[2]
        found.append(
            Holder("in no variable", count(answer.values.get("outside")), None, printable(words, 160))
        )
    return [replace(found[0], detail=f"{found[0].detail}; {when}"), *found[1:]] if found else []


def _detail(variable: dict[str, Any]) -> str:
    device = f" on {variable['device']}" if variable["device"] else ""
    place = f", {holders.where(variable)}" if variable["place"] else ""
    return printable(f"{variable['what']}{device}{place}", 160)


def _named(evidence: Evidence) -> list[Reading]:
    answer = _answer(evidence)
    words = holders.sentence(answer.values) if answer is not None else None
    return [Reading(words, "events.jsonl", answer.wall)] if answer is not None and words else []


def named_advice(evidence: Evidence, grows: bool = False) -> str | None:
    """What to do about the variable, or the buffers, that held the most; None where none is known."""
    answer = _answer(evidence)
    if answer is None or answer.values.get("error") or holders.children(answer.values) is not None:
        return None
    values, resident = answer.values, number(answer.values.get("resident")) or 0.0
    outside = number(values.get("outside")) or 0.0
    large = [each for each in holders.large(values) if each["bytes"] >= _WORTH * resident]
    if outside >= _WORTH * resident and (not large or outside > large[0]["bytes"]):
        if pipelines := holders.texts(values, "pipelines"):
            return (
                f'{" and ".join(pipelines[:2])} keep their elements in RAM: cache into a file (`.cache("cache")`), '
                "and shuffle file names or numbers before they are loaded, or with a smaller buffer"
            )
        if graphs := holders.texts(values, "graphs"):
            return (
                f"{graphs[0]} keeps tensors with the graphs they were computed by: keep `loss.item()` instead"
            )
    if not large:
        return None
    remedy = ": read it in pieces, or memory-map it" if _is_data(large[0]["what"]) else ""
    if grows:
        remedy = ": empty it as you go, and keep numbers (`loss.item()`), not tensors"
    return f"hold less in {printable(holders.describe(large[0]), 160)}{remedy}"


def _is_data(what: str) -> bool:
    return " of " in what or what.startswith(("NumPy array", "tensor", "tf.data", "DataFrame", "Series"))


def _advice(evidence: Evidence) -> str:
    known = named_advice(evidence)
    if known is not None:
        return known
    if count(evidence.last_sample.get("step")):
        return "use less RAM: a smaller batch, fewer loader workers, a data set that is read in pieces"
    return "it filled the RAM before its first step: make caches and shuffle buffers smaller, and load data in pieces"


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
    files = sample_files(folder)
    fine = [row for path in files for row in _table(path, _MOST_ROWS // len(files))]
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
    names, lines = read_table(path, _MOST_BYTES)
    lines = [line for line in lines if line]
    chosen = lines[:: -max(1, len(lines) // max(1, most))][::-1]
    return [row for row in (parse_row(line, names) for line in chosen) if row]


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
