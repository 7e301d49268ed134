"""A file as rules see it: code cells parsed into one line numbering, and the way back to the file's own places."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

from buoy.lint.model import Place, Span

Kind = Literal["python", "notebook", "markdown"]

_NEWLINE = re.compile(r"\r\n|\n|\r")
MAX_SOURCE = 2_000_000
"""Characters of one cell or script above which parsing costs minutes and gigabytes; generated data,
not training code.
"""


@dataclass(slots=True)
class Cell:
    """One piece of code: a whole script, a notebook's code cell, a Markdown fence."""

    text: str
    """The source as the file has it."""
    first_line: int
    """Number of its first line in the document's numbering."""
    number: int | None = None
    """What people call it (notebooks: counted over all cells from 1); None when the file has no cells."""
    python: str = ""
    """The source with magics made harmless: same number of lines."""
    tree: ast.Module | None = None
    """None when it is not Python or does not parse."""
    problem: Problem | None = None
    binds: tuple[str, ...] = ()
    """Names that a magic assigns (`files = !ls`)."""
    indented: bool = False
    """It may stand further in as a whole: a notebook's cell, a fence in a list."""
    opaque: bool = False
    """It may define names that cannot be read here (`%run`, `%pylab`)."""
    shell: tuple[str, ...] = ()
    """The shell lines and magics it runs, for rules that look for a copy or a download."""
    _lines: list[str] | None = None

    def lines(self) -> list[str]:
        """Its source lines, without their ends."""
        if self._lines is None:
            self._lines = split_lines(self.text)
        return self._lines


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a cell could not be parsed."""

    message: str
    line: int
    column: int
    unread: bool = False
    """Not a mistake in the code: it was too large, too deep or not text, and nobody looked at it."""


@dataclass(slots=True)
class Document:
    """A file's cells, in order."""

    path: str
    kind: Kind
    cells: list[Cell]
    colab: bool = False
    """The notebook's own metadata says that Colab made it."""
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._starts = [cell.first_line for cell in self.cells]

    def cell_at(self, line: int) -> Cell:
        """The cell that holds a line of the document's numbering."""
        return self.cells[max(0, bisect_right(self._starts, line) - 1)]

    def line(self, number: int) -> str:
        """A source line without its end; empty when there is none."""
        cell = self.cell_at(number)
        lines = cell.lines()
        index = number - cell.first_line
        return lines[index] if 0 <= index < len(lines) else ""

    def place(self, line: int, column: int) -> Place:
        """The position as people name it."""
        if self.kind != "notebook":
            return Place(line, column + 1)
        cell = self.cell_at(line)
        return Place(line - cell.first_line + 1, column + 1, cell.number)

    def span(self, node: ast.AST) -> Span:
        """The span of a syntax node; `ast` counts columns in UTF-8 bytes, people and editors in characters."""
        line = getattr(node, "lineno", 1)
        end_line = getattr(node, "end_lineno", None) or line
        start = self._characters(line, getattr(node, "col_offset", 0))
        end = self._characters(end_line, getattr(node, "end_col_offset", None) or 0)
        return Span(line, start, end_line, max(end, start) if line == end_line else end)

    def text(self, span: Span) -> str:
        """The source under a span."""
        if span.line == span.end_line:
            return self.line(span.line)[span.column : span.end_column]
        middle = [self.line(number) for number in range(span.line + 1, span.end_line)]
        return "\n".join(
            [self.line(span.line)[span.column :], *middle, self.line(span.end_line)[: span.end_column]]
        )

    def _characters(self, line: int, byte_column: int) -> int:
        text = self.line(line)
        if text.isascii():
            return min(byte_column, len(text))
        return len(text.encode("utf-8", "surrogatepass")[:byte_column].decode("utf-8", "ignore"))


def split_lines(text: str) -> list[str]:
    """Lines as Python's parser counts them: `str.splitlines` also breaks at form feeds and separators."""
    if "\r" not in text:
        return text.split("\n")
    return _NEWLINE.split(text)


def plain_newlines(text: str) -> str:
    """The text with every line ending as a line feed, which is how the parser reads it."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
