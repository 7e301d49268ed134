"""RAM before the end: how long it stood at its limit, which variables held it, and what follows from both.

Whatever ended the training, a restart of the kernel or a user's Stop too: that memory had been full for minutes, and
that no step ever came, is what its user has to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from buoy.fields import count, mapping, number, text
from buoy.flight import holders
from buoy.flight.alarms.level import is_high
from buoy.flight.log import memory_use, read_samples
from buoy.text import printable
from buoy.units import format_bytes, format_duration
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
            Holder("no variable's", count(answer.values.get("outside")), None, printable(words, 160))
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
