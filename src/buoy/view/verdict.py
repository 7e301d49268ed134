"""A verdict as text: full (at most 25 lines) and concise (at most 6). Readable without colour."""

from __future__ import annotations

import os
import textwrap
import time
from typing import Literal

from buoy.units import format_bytes, format_duration
from buoy.verdict.model import Claim, Grade, Reading, Verdict, Where
from buoy.verdict.values import printable

Style = Literal["full", "concise"]

FULL_LINES, CONCISE_LINES, WIDTH = 25, 6, 100
_LABEL = 11
_COLOURS: dict[Grade, str] = {"certain": "32", "likely": "33", "possible": "35"}


def render(verdict: Verdict, style: Style = "full", colour: bool = False) -> str:
    """The verdict for people; ends without a newline."""
    return "\n".join(_full(verdict, colour) if style == "full" else _concise(verdict, colour))


def _full(verdict: Verdict, colour: bool) -> list[str]:
    cause = verdict.cause
    lines = [_headline(verdict), ""]
    # What must not be missing comes first in the budget; evidence fills what is left.
    lines += _claim("cause", cause.claim, colour, readings=3)
    lines += _claim("mechanism", verdict.mechanism, colour, readings=0, most=1)
    if cause.actor is not None:
        lines += _claim("actor", cause.actor, colour, readings=0)
    for number, claim in enumerate(cause.cascade[:3]):
        lines += _claim("before" if number == 0 else "", claim, colour, readings=0, most=1)
    place = place_of(verdict.where)
    if place:
        lines += _wrapped("where", place, 1)
    lines += _holders(verdict)
    for number, step in enumerate(cause.next[:3]):
        lines += _wrapped("next" if number == 0 else "", f"{number + 1}. {step}", 2)
    return lines[:FULL_LINES]


def _concise(verdict: Verdict, colour: bool) -> list[str]:
    cause = verdict.cause
    name = f"{_run_name(verdict)} #{verdict.attempt}: {cause.id} ({_grade(cause.claim.grade, colour)})"
    lines = [name, *_indented(cause.claim.text, 2)]
    details = [verdict.mechanism.text, place_of(verdict.where)]
    if verdict.ran_for is not None:
        details.append(f"after {format_duration(verdict.ran_for)}")
    lines += _indented("; ".join(part for part in details if part), 1)
    if cause.claim.evidence:
        lines += _indented("evidence: " + _reading(cause.claim.evidence[0]), 1)
    if cause.next:
        lines += _indented("hint: " + cause.next[0], 1)
    return lines[:CONCISE_LINES]


def place_of(where: Where) -> str:
    """`step 120, epoch 2, train, train.py:31 in loss`; empty when nothing is known."""
    parts = []
    if where.step:
        parts.append(f"step {where.step}")
    if where.epoch is not None:
        parts.append(f"epoch {where.epoch}")
    if where.phase and where.phase not in ("start", "done"):
        parts.append(where.phase)
    if where.cell:
        parts.append(f"cell {printable(where.cell, 30)}")
    if where.file:
        function = f" in {printable(where.function, 30)}" if where.function else ""
        line = f":{where.line}" if where.line else ""
        parts.append(f"{_short_path(where.file)}{line}{function}")
    text = ", ".join(parts)
    if where.seconds_before is not None and text:
        text += f" ({format_duration(where.seconds_before)} before)"
    return text


def _headline(verdict: Verdict) -> str:
    parts = [f"{_run_name(verdict)}, attempt {verdict.attempt}"]
    if verdict.ran_for is not None:
        parts.append(f"ran {format_duration(verdict.ran_for)}")
    if verdict.wall is not None:
        parts.append(
            "ended " + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(0.0, min(verdict.wall, 4e9))))
        )
    return _cut(f"{verdict.cause.id}: {' · '.join(parts)}", WIDTH)


def _run_name(verdict: Verdict) -> str:
    return printable(os.path.basename(verdict.run) or verdict.run or "run", 40)


def _claim(label: str, claim: Claim, colour: bool, readings: int, most: int = 2) -> list[str]:
    text = printable(claim.text, WIDTH * 2)
    lines = _wrapped(label, f"{text} [{claim.grade}]", most)
    if colour:
        lines[-1] = lines[-1].replace(f"[{claim.grade}]", f"[{_grade(claim.grade, True)}]")
    lines += [_cut(" " * _LABEL + "- " + _reading(reading), WIDTH) for reading in claim.evidence[:readings]]
    return lines


def _holders(verdict: Verdict) -> list[str]:
    lines = []
    for number, holder in enumerate(verdict.holders[:3]):
        who = f" (pid {holder.pid})" if holder.pid else ""
        detail = f", {holder.detail}" if holder.detail and holder.detail != "main" else ""
        label = "memory" if number == 0 else ""
        lines += _wrapped(
            label, f"{format_bytes(holder.bytes):>10}  {printable(holder.name, 50)}{who}{detail}", 1
        )
    return lines


def _reading(reading: Reading) -> str:
    when = ""
    if reading.wall is not None and 0 < reading.wall < 4e9:
        when = time.strftime(", %H:%M:%S", time.localtime(reading.wall))
    source = f" ({reading.source}{when})" if reading.source else ""
    return _cut(printable(reading.text, 200), WIDTH - _LABEL - 2 - len(source)) + source


def _wrapped(label: str, text: str, most: int) -> list[str]:
    lines = textwrap.wrap(printable(text, WIDTH * 3), WIDTH - _LABEL, break_long_words=True) or [""]
    if len(lines) > most:
        # The grade at the end says more than the words before it.
        tail = lines[-1][lines[-1].rfind(" [") :] if lines[-1].endswith("]") and " [" in lines[-1] else ""
        lines = lines[:most]
        lines[-1] = _cut(lines[-1] + " ...", WIDTH - _LABEL - len(tail)) + tail
    return [f"{label if number == 0 else '':{_LABEL}}{line}" for number, line in enumerate(lines)]


def _indented(text: str, most: int) -> list[str]:
    lines = textwrap.wrap(printable(text, WIDTH * 3), WIDTH - 2, break_long_words=True)
    if len(lines) > most:
        lines = [*lines[: most - 1], _cut(lines[most - 1] + " ...", WIDTH - 2)]
    return [f"  {line}" for line in lines]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - 3)].rstrip(". ") + "..."


def _short_path(path: str) -> str:
    path = printable(path, 200)
    here = os.getcwd() + os.sep
    path = path.removeprefix(here)
    return path if len(path) <= 60 else "..." + path[-57:]


def _grade(grade: Grade, colour: bool) -> str:
    return f"\x1b[{_COLOURS[grade]}m{grade}\x1b[0m" if colour else grade
