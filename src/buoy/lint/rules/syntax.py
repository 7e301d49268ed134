"""BY981: a cell or script that Python cannot parse."""

from __future__ import annotations

import re
from collections.abc import Iterator

from buoy.lint.document import Cell
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule, Severity, Span
from buoy.lint.target import Target

RULE = Rule("BY981", "does-not-parse", "a cell or script is not valid Python")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Every cell with a syntax error; what other cells hold is checked all the same."""
    for cell in facts.document.cells:
        problem = cell.problem
        if problem is None:
            continue
        column = min(problem.column, len(facts.document.line(problem.line)))
        what = (
            "this cell"
            if facts.document.kind == "notebook"
            else "this code"
            if facts.document.kind == "markdown"
            else "this file"
        )
        message = f"{what} does not parse: {problem.message}"
        severity: Severity = "error" if facts.document.kind != "markdown" else "warning"
        if cell.tree is not None:
            severity, message = (
                "warning",
                "this file holds IPython's `%` or `!` lines: `python` cannot run it",
            )
        yield Finding(
            Span(problem.line, column, problem.line, column),
            severity,
            message,
            _hint(cell, problem.line - cell.first_line),
        )


def _hint(cell: Cell, index: int) -> str:
    lines = cell.lines()
    line = lines[index] if 0 <= index < len(lines) else ""
    if re.match(r"\s*print\s+[^(=]", line) or re.search(r"\bexcept\s+\w+\s*,\s*\w+\s*:", line):
        return "this is Python 2; `2to3` or `print(...)` mends it"
    if line.lstrip().startswith(("!", "%")):
        return "`!` and `%` lines work in notebooks only: use `subprocess.run([...])` in a script"
    return "mend the syntax; until then nothing in this piece can run"
