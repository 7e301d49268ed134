"""What a finding is: a rule's statement about a span of source, with its severity, its hint and perhaps its fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: this will fail. warning: this puts the session at risk. note: worth knowing; never fails a check."""

Safety = Literal["safe", "unsafe", "display"]
"""safe: same meaning, applied by --fix. unsafe: changes what the program does. display: shown, never applied."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Where something stands in a document: lines from 1, columns from 0 and in characters, end exclusive.

    In a notebook the lines count through all code cells; `Document.place` turns them into cell and line.
    """

    line: int
    column: int
    end_line: int
    end_column: int

    def start(self) -> Span:
        """The point where it begins, to insert something there."""
        return Span(self.line, self.column, self.line, self.column)

    def end(self, before: int = 0) -> Span:
        """The point where it ends, or so many characters before that."""
        column = self.end_column - before
        return Span(self.end_line, column, self.end_line, column)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace a span (empty for an insertion) by a text."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """How a finding can be fixed."""

    title: str
    edits: tuple[Edit, ...]
    safety: Safety = "unsafe"


@dataclass(frozen=True, slots=True)
class Place:
    """A position as users name it: line in the file, or cell and line inside the cell; both from 1,
    as is the column.
    """

    line: int
    column: int
    cell: int | None = None

    def __str__(self) -> str:
        """`12:5`, or `cell 3:12:5` in a notebook."""
        prefix = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{prefix}{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of a rule without running it."""

    code: str
    name: str
    summary: str
    default: bool = True
    """Whether it runs when nobody selected anything."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule says of a span; places and paths are added by the engine."""

    span: Span
    severity: Severity
    message: str
    hint: str
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding in one file, complete: what every renderer prints."""

    path: str
    """As the user would write it: relative to the working folder, `-` for standard input."""
    code: str
    name: str
    severity: Severity
    message: str
    hint: str
    start: Place
    end: Place
    source: tuple[str, ...]
    """The source lines the span touches (the first few)."""
    fingerprint: str
    """With the path, tells this finding from all others, also after edits elsewhere in the file."""
    span: Span
    fix: Fix | None = field(default=None, compare=False)


def fingerprint(code: str, text: str, occurrence: int) -> str:
    """A name for a finding within its file that survives edits elsewhere in it: rule, text of the line, and which
    of several. The path is not in it: that depends on where the command was run.

    >>> fingerprint("BY102", "x = np.ones(3)", 0) == fingerprint("BY102", "  x = np.ones(3) ", 0)
    True
    """
    from hashlib import sha256  # costs 6 ms to import, and most checks find nothing

    return sha256("\0".join((code, text.strip(), str(occurrence))).encode()).hexdigest()[:16]
