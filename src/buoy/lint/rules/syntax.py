"""BY981: a cell or script that Python cannot parse."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from buoy.lint.document import Cell, Problem
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule, Severity, Span
from buoy.lint.target import Target

RULE = Rule("BY981", "does-not-parse", "a cell or script is not valid Python")

_HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Syntax that came later than the oldest Python buoy runs on: (release, line, the parser's words).
_NEWER = (
    (
        (3, 12),
        re.compile(r"^\s*(async\s+)?(def|class)\s+\w+\s*\[|^\s*type\s+\w+\s*(\[.*\])?\s*="),
        re.compile(""),
    ),
    (
        (3, 12),
        re.compile(r"\b(f|fr|rf)[\"']", re.IGNORECASE),
        re.compile("expecting '}'|backslash|'#'|unterminated|unmatched|nested too deeply"),
    ),
    ((3, 14), re.compile(r"\b(t|tr|rt)[\"']", re.IGNORECASE), re.compile("")),
    ((3, 14), re.compile(r"^\s*except\s+[A-Z][\w.]*(\s*,\s*[A-Z][\w.]*)+\s*:"), re.compile("")),
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Every cell with a syntax error; what other cells hold is checked all the same."""
    for cell in facts.document.cells:
        problem = cell.problem
        if problem is None or problem.unread:
            continue
        column = min(problem.column, len(facts.document.line(problem.line)))
        what = (
            "this cell"
            if facts.document.kind == "notebook"
            else "this code"
            if facts.document.kind == "markdown"
            else "this file"
        )
        message = f"{what} does not parse in Python {_HERE}: {problem.message}"
        severity: Severity = "error" if facts.document.kind != "markdown" else "warning"
        hint = _hint(cell, problem.line - cell.first_line)
        newer = _needs(cell, problem)
        if newer is not None:
            severity = "note"
            message = f"Python {_HERE}, which runs buoy, cannot read {what} ({problem.message})"
            hint = f"this looks like the syntax of Python {newer}: run buoy with that to check it"
        if cell.tree is not None:
            severity, message = (
                "warning",
                "this file holds IPython's `%` or `!` lines: `python` cannot run it",
            )
        yield Finding(
            Span(problem.line, column, problem.line, column),
            severity,
            message,
            hint,
        )


def _needs(cell: Cell, problem: Problem) -> str | None:
    """The Python whose syntax this looks like, when the one that runs buoy is older."""
    line = cell.lines()[problem.line - cell.first_line]
    for release, written, said in _NEWER:
        if sys.version_info[:2] < release and written.search(line) and said.search(problem.message):
            return f"{release[0]}.{release[1]}"
    return None


def _hint(cell: Cell, index: int) -> str:
    lines = cell.lines()
    line = lines[index] if 0 <= index < len(lines) else ""
    if re.match(r"\s*print\s+[^(=]", line) or re.search(r"\bexcept\s+\w+\s*,\s*\w+\s*:", line):
        return "this is Python 2; `2to3` or `print(...)` mends it"
    if line.lstrip().startswith(("!", "%")):
        return "`!` and `%` lines work in notebooks only: use `subprocess.run([...])` in a script"
    return "mend the syntax; until then nothing in this piece can run"
