"""Findings for people: full (source, caret, hint) and concise (one line each)."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TextIO

from buoy.errors import in_notebook
from buoy.lint.engine import Report
from buoy.lint.model import Diagnostic
from buoy.text import visible

_COLOURS = {"error": "31", "warning": "33", "note": "36", "bold": "1", "dim": "2"}
_WIDEST = 160


class Paint:
    """Colour where it is wanted; the words alone always say everything."""

    def __init__(self, stream: TextIO) -> None:
        variables = os.environ
        if variables.get("NO_COLOR"):
            self.on = False
        elif variables.get("FORCE_COLOR"):
            self.on = True
        else:
            self.on = stream.isatty() and variables.get("TERM") != "dumb"

    def __call__(self, text: str, style: str) -> str:
        """The text in a style."""
        return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if self.on else text


def full(report: Report, paint: Paint) -> str:
    """Each finding with its source line, a caret, and what to do."""
    parts = [_full(_shown(item), paint) for item in report.diagnostics]
    return "\n".join([*parts, summary(report)]) + "\n"


def concise(report: Report, paint: Paint) -> str:
    """One line per finding: `train.py:12:5: BY401 warning: ...`."""
    lines = [
        f"{location(item)}: {item.code} {paint(item.severity, item.severity)}: {item.message}"
        for item in map(_shown, report.diagnostics)
    ]
    return "\n".join([*lines, summary(report)]) + "\n"


def _shown(item: Diagnostic) -> Diagnostic:
    """What it says of somebody's file, as a terminal may have it."""
    return replace(
        item,
        path=visible(item.path),
        message=visible(item.message),
        hint=visible(item.hint),
        source=tuple(map(visible, item.source)),
        fix=item.fix and replace(item.fix, title=visible(item.fix.title)),
    )


def location(item: Diagnostic) -> str:
    """`train.py:12:5`, `notes.ipynb:cell 3:12:5`."""
    return f"{item.path}:{item.start}"


def summary(report: Report) -> str:
    """The last line: how many of each, and what `--fix` would mend (of files: a notebook's cells are in memory)."""
    number, what = (report.cells, "cell") if report.cells else (report.files, "file")
    where = f"{number} {what}{'s' if number != 1 else ''}" + (" run so far" if report.cells else "")
    if not report.diagnostics:
        return f"nothing found in {where}"
    count = Counter(item.severity for item in report.diagnostics)
    words = ", ".join(
        f"{count[kind]} {kind}{'s' if count[kind] != 1 else ''}"
        for kind in ("error", "warning", "note")
        if count[kind]
    )
    if in_notebook():
        return f"{words} in {where}"
    safe = sum(1 for item in report.diagnostics if item.fix and item.fix.safety == "safe")
    unsafe = sum(1 for item in report.diagnostics if item.fix and item.fix.safety == "unsafe")
    mend = f"; `--fix` mends {safe}" if safe else ""
    mend += f"; `--unsafe-fixes` mends {unsafe} more" if unsafe else ""
    return f"{words} in {where}{mend}"


def _full(item: Diagnostic, paint: Paint) -> str:
    lines = [
        f"{paint(location(item), 'bold')}: {item.code} {item.name}",
        f"  {paint(item.severity, item.severity)}: {item.message}",
    ]
    if item.source and item.source[0].strip():
        lines += _excerpt(item, paint)
    lines.append(f"  hint: {item.hint}")
    if item.fix is not None:
        lines.append(f"  fix: {item.fix.title} ({_how(item)})")
    return "\n".join(lines) + "\n"


def _how(item: Diagnostic) -> str:
    option = {"safe": "--fix", "unsafe": "--unsafe-fixes"}.get(item.fix.safety if item.fix else "")
    if option is None or not in_notebook():
        return "do it by hand" if option is None else f"`{option}` does it"
    # What is checked here is mostly the cells as they were run: there is no file that could be mended.
    return "change the cell" if item.start.cell is not None else f"`!buoy check {item.path} {option}` does it"


def _excerpt(item: Diagnostic, paint: Paint) -> list[str]:
    text = item.source[0]
    number = str(item.start.line)
    first = len(text) - len(text.lstrip())
    column = max(item.start.column - 1, 0)
    # Tabs keep their width under the caret when the caret line repeats them.
    lead = "".join("\t" if char == "\t" else " " for char in text[first:column])
    width = (item.end.column - item.start.column) if len(item.source) == 1 else len(text.rstrip()) - column
    if column > _WIDEST:
        return [f"  {paint(number, 'dim')} | {text[column - 20 : column + _WIDEST]}"]
    return [
        f"  {paint(number, 'dim')} | {text[first : first + _WIDEST].rstrip()}",
        f"  {' ' * len(number)} | {lead}{'^' * max(1, min(width, _WIDEST - column))}",
    ]
