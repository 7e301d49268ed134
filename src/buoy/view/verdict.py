"""A verdict as text: full (at most 25 lines) and concise (at most 6). Readable without colour."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from typing import Literal

from buoy.text import printable
from buoy.units import format_bytes, format_duration
from buoy.verdict.model import Claim, Grade, Reading, Verdict, Where
from buoy.verdict.stacks import is_cell

Style = Literal["full", "concise"]

FULL_LINES, CONCISE_LINES = 25, 6
NARROWEST, WIDEST = 60, 100
_LABEL = 11
_FOLDS = 3
"""Lines that one reading may take."""
_HOLDERS = 4
_COLOURS: dict[Grade, str] = {"certain": "32", "likely": "33", "possible": "35"}


def render(verdict: Verdict, style: Style = "full", colour: bool = False, width: int | None = None) -> str:
    """The verdict for users, folded to the terminal's width unless given; ends without a newline."""
    page = _Page(width or terminal_width(), colour)
    return "\n".join(page.full(verdict) if style == "full" else page.concise(verdict))


def terminal_width() -> int:
    """The columns of the terminal on stdout, within reason; all there may be when it is none."""
    if not sys.stdout.isatty():
        return WIDEST
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def place_of(where: Where) -> str:
    """`step 120, epoch 2, train, train.py:31 in loss`; empty when nothing is known."""
    parts = []
    if where.step:
        parts.append(f"step {where.step}")
    if where.epoch is not None:
        parts.append(f"epoch {where.epoch + 1}")
    if where.phase and where.phase not in ("start", "done"):
        parts.append(where.phase)
    if where.cell:
        parts.append(f"cell {printable(where.cell, 30)}")
    if where.file:
        name = None if is_cell(where.file) and where.function == "<module>" else where.function
        function = f" in {printable(name, 30)}" if name else ""
        line = f":{where.line}" if where.line else ""
        # What runs at the top of a cell is the cell that is named; a function may come from another one.
        is_named = where.cell and where.function == "<module>"
        other = where.file_cell or "a cell"
        cell = f"line {where.line}{'' if is_named else f' of {other}'}" if where.line else other
        place = cell if is_cell(where.file) else f"{_short_path(where.file)}{line}"
        parts.append(f"{place}{function}")
    text = ", ".join(parts)
    if where.seconds_before is not None and text:
        text += f" ({format_duration(where.seconds_before)} before)"
    return text


class _Page:
    """Lines of one width, coloured or not."""

    def __init__(self, width: int, colour: bool) -> None:
        self._width = width
        self._colour = colour

    def full(self, verdict: Verdict) -> list[str]:
        """Evidence is folded, since what proves it may stand at its end; cut only where the page would overflow."""
        for fold in (_FOLDS, 2, 1):
            lines = self._full(verdict, fold)
            if len(lines) <= FULL_LINES:
                break
        return lines[:FULL_LINES]

    def _full(self, verdict: Verdict, fold: int) -> list[str]:
        cause = verdict.cause
        lines = [self._headline(verdict), ""]
        lines += self._claim("cause", cause.claim)
        indent = " " * _LABEL
        for item in cause.claim.evidence[:3]:
            first, *others = self._reading(item, _LABEL + 2, fold)
            lines += [f"{indent}- {first}", *(f"{indent}  {other}" for other in others)]
        lines += self._claim("mechanism", verdict.mechanism, most=min(2, fold))
        if cause.actor is not None:
            lines += self._claim("actor", cause.actor)
        for number, claim in enumerate(cause.cascade[:3]):
            lines += self._claim("before" if number == 0 else "", claim, most=min(2, fold))
        place = place_of(verdict.where)
        if place:
            lines += self._labelled("where", place, min(2, fold))
        lines += self._holders(verdict)
        if verdict.beside:
            lines += self._labelled("beside", verdict.beside, 2)
        # What to do fills the lines that are left, each piece of advice whole or not at all.
        for number, step in enumerate(cause.next[:3]):
            advice = self._labelled("next" if number == 0 else "", f"{number + 1}. {step}", 4, pasted=True)
            if number and len(lines) + len(advice) > FULL_LINES:
                break
            lines += advice
        return lines

    def concise(self, verdict: Verdict) -> list[str]:
        cause = verdict.cause
        name = f"{_run_name(verdict)} #{verdict.attempt}: {cause.id} ({self._grade(cause.claim.grade)})"
        if verdict.ran_for is not None:
            name += f" after {format_duration(verdict.ran_for)}"
        # What the claim has said already is not said again.
        news = [part for part in (verdict.mechanism.text, place_of(verdict.where)) if part]
        details = self._indented("; ".join(part for part in news if part not in cause.claim.text), 1)
        said = (cause.claim.text, verdict.mechanism.text)
        first = next(
            (item for item in cause.claim.evidence if not any(item.text in each for each in said)), None
        )
        claim = printable(cause.claim.text, WIDEST * 2)
        painted = len(self._grade(cause.claim.grade)) - len(cause.claim.grade)
        if not details and first is None and len(f"{name}: {claim}") - painted <= self._width:
            lines = [f"{name}: {claim}"]
        else:
            lines = [name, *self._indented(claim, 2), *details]
        hint = self._hint(cause.next, CONCISE_LINES - len(lines))
        label = "evidence:"
        if (
            cause.cascade and cause.cascade[0].grade == "certain"
        ):  # what came before says more than where that is read
            label, first = "before:", Reading(cause.cascade[0].text, "")
        for fold in (2, 1):
            words = self._reading(first, 3 + len(label), fold) if first else []
            if words and len(lines) + len(words) + len(hint) <= CONCISE_LINES:
                lines += [
                    f"  {label if not number else '':{len(label)}} {each}"
                    for number, each in enumerate(words)
                ]
                break
        lines += hint
        if verdict.beside and len(lines) < CONCISE_LINES:
            lines += self._indented(verdict.beside, 1)
        return lines[:CONCISE_LINES]

    def _hint(self, steps: tuple[str, ...], room: int) -> list[str]:
        """The best advice on two lines, or three for a command, which is never cut: rather alone, or other advice."""
        if not steps:
            return []
        command = next((part for part in steps[0].split("`")[1::2] if " " in part), None)
        if command is None:
            return self._indented(f"hint: {steps[0]}", 2)
        choices = [
            self._indented(f"hint: {words}", 9, pasted=True)
            for words in (steps[0], f"`{command}`", *steps[1:])
        ]
        return next((lines for lines in choices if len(lines) <= max(2, min(3, room))), choices[0][:2])

    def _headline(self, verdict: Verdict) -> str:
        parts = [f"{_run_name(verdict)}, attempt {verdict.attempt}"]
        if verdict.ran_for is not None:
            parts.append(f"ran {format_duration(verdict.ran_for)}")
        if verdict.wall is not None:
            when = time.localtime(max(0.0, min(verdict.wall, 4e9)))
            parts.append("ended " + time.strftime("%Y-%m-%d %H:%M:%S", when))
        return _cut(f"{verdict.cause.id}: {' · '.join(parts)}", self._width)

    def _claim(self, label: str, claim: Claim, most: int = 2) -> list[str]:
        text = printable(claim.text, WIDEST * 2)
        lines = self._labelled(label, f"{text} [{claim.grade}]", most)
        if self._colour:
            lines[-1] = lines[-1].replace(f"[{claim.grade}]", f"[{self._grade(claim.grade)}]")
        return lines

    def _holders(self, verdict: Verdict) -> list[str]:
        lines = []
        for number, holder in enumerate(verdict.holders[:_HOLDERS]):
            who = f" (pid {holder.pid})" if holder.pid else ""
            detail = (holder.detail or "").removeprefix("main").removeprefix("; ")
            words = f"{printable(holder.name, 50)}{who}{f', {detail}' if detail else ''}"
            lines += self._labelled(
                "memory" if number == 0 else "", f"{format_bytes(holder.bytes):>10}  {words}", 2
            )
        return lines

    def _reading(self, reading: Reading, indent: int, most: int) -> list[str]:
        when = ""
        if reading.wall is not None and 0 < reading.wall < 4e9:
            when = time.strftime(", %H:%M:%S", time.localtime(reading.wall))
        source = f" ({reading.source}{when})" if reading.source else ""
        text = printable(reading.text, 200)
        lines = _folded(text + source, self._width - indent)
        return lines if len(lines) <= most else [_cut(text, self._width - indent - len(source)) + source]

    def _labelled(self, label: str, text: str, most: int, pasted: bool = False) -> list[str]:
        room = self._width - _LABEL
        lines = _folded(text, room, pasted) or [""]
        if len(lines) > most:
            # The grade at the end says more than the words before it.
            tail = text[text.rfind(" [") :] if text.endswith("]") and " [" in text else ""
            lines = lines[:most]
            lines[-1] = _cut(lines[-1] + " ...", room - len(tail)) + tail
        return [f"{label if number == 0 else '':{_LABEL}}{line}" for number, line in enumerate(lines)]

    def _indented(self, text: str, most: int, pasted: bool = False) -> list[str]:
        lines = _folded(text, self._width - 2, pasted)
        if len(lines) > most:
            lines = [*lines[: most - 1], _cut(lines[most - 1] + " ...", self._width - 2)]
        return [f"  {line}" for line in lines]

    def _grade(self, grade: Grade) -> str:
        return f"\x1b[{_COLOURS[grade]}m{grade}\x1b[0m" if self._colour else grade


def _folded(text: str, room: int, pasted: bool = False) -> list[str]:
    """Lines of at most so many columns; what stands in backticks stays on one line if one can hold it.

    `pasted`: that are commands, which a line break of ours would spoil: a longer one is a longer line.
    """
    lines: list[str] = []
    for word in _words(printable(text, WIDEST * 3), None if pasted else room):
        # A number or a label, which would stand there alone.
        begins = bool(lines) and len(lines[-1]) <= _LABEL
        is_command = pasted and "`" in word
        if lines and (len(lines[-1]) + 1 + len(word) <= room or (is_command and begins)):
            lines[-1] += f" {word}"
        elif is_command or len(word) <= room:
            lines.append(word)
        else:
            lines += textwrap.wrap(word, room, break_on_hyphens=False)
    return lines


def _words(text: str, most: int | None) -> list[str]:
    """What is not broken: words, and what stands in backticks (of so many signs), with the signs that touch it."""
    parts = text.split("`")
    for place in range(1, len(parts) - 1, 2):
        if most is None:
            parts[place] = _from_here(parts[place])
        if most is None or len(parts[place]) + 3 <= most:  # the backticks, and a comma after them
            parts[place] = parts[place].replace(" ", "\xa0")
    return [word.replace("\xa0", " ") for word in "`".join(parts).split(" ") if word]


def _from_here(command: str) -> str:
    """A command with its paths as they can be typed in the working directory."""
    try:
        here = os.getcwd()
    except OSError:  # it is gone
        return command
    return command.replace(f" {here}/", " ") if here != "/" else command


def _run_name(verdict: Verdict) -> str:
    return printable(os.path.basename(verdict.run) or verdict.run or "run", 40)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - 3)].rstrip(". ") + "..."


def _short_path(path: str) -> str:
    path = printable(path, 200)
    here = os.getcwd() + os.sep
    path = path.removeprefix(here)
    return path if len(path) <= 60 else "..." + path[-57:]
