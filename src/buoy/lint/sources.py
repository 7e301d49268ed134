"""From bytes to a Document: scripts, notebooks (nbformat 3 and 4), Markdown fences; nothing raises on bad input.

A Document is a file as rules see it: code cells parsed into one line numbering, and the way back to the file's own
places. The code in a magic that nbconvert wrote as a call, `get_ipython().run_cell_magic('time', '', '...')`, counts.
"""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from buoy.lint.magics import strip_magics
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
    """What users call it (notebooks: counted over all cells from 1); None when the file has no cells."""
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
        """The position as users name it."""
        if self.kind != "notebook":
            return Place(line, column + 1)
        cell = self.cell_at(line)
        return Place(line - cell.first_line + 1, column + 1, cell.number)

    def span(self, node: ast.AST) -> Span:
        """The span of a syntax node; `ast` counts columns in UTF-8 bytes, users and editors in characters."""
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


MAX_FILE = 64 << 20
"""Of a notebook, whose outputs may be large."""
_MAX_SCRIPT = 4 * MAX_SOURCE
ENDINGS = ("", ".py", ".pyw", ".pyi", ".ipynb", ".md", ".markdown")
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.MULTILINE)
# At any depth, since fences stand in lists of lists; `- ```python` opens one, too.
_FENCE = re.compile(r"^[ \t]*(?:[-*+][ \t]+|\d+[.)][ \t]+)?(?P<marks>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
_PYTHON_FENCES = frozenset({"python", "py", "python3", "ipython", "ipython3"})
# A line that can start a top-level statement, for reading on after a syntax error.
_STATEMENT_START = re.compile(r"^(?!(?:else|elif|except|finally|case)\b)[A-Za-z_@(\[{\"'-]")


class Unreadable(Exception):  # noqa: N818 - a state of the file, reported as a finding, not an error of ours
    """The file cannot be read as what its name says; the message says why."""


def read_document(path: str, data: bytes) -> Document:
    """Parse a file's bytes; raises only Unreadable."""
    ending = os.path.splitext(path)[1].lower()
    most = MAX_FILE if ending == ".ipynb" else _MAX_SCRIPT
    if len(data) > most:
        raise Unreadable(f"the file has {len(data) >> 20} MiB; buoy reads up to {most >> 20} MiB")
    if ending == ".ipynb":
        return _notebook(path, data)
    if ending not in ENDINGS:
        raise Unreadable(f"`{ending}` is not the ending of a script, a notebook or a Markdown page")
    text = decode(data)
    if ending in (".md", ".markdown"):
        return _markdown(path, text)
    return _script(path, text)


def decode(data: bytes) -> str:
    """The text of a source file: UTF-8, or what its coding line says."""
    if b"\0" in data[:8192]:
        raise Unreadable("this is a binary file")
    try:
        return data.decode(encoding_of(data))
    except (LookupError, UnicodeDecodeError):
        pass  # nor is it UTF-8, which was tried first
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"it is not UTF-8 text (byte 0x{data[error.start]:02x} in line {line})") from None


def encoding_of(data: bytes) -> str:
    """UTF-8 where the bytes are that, else what the coding line says."""
    if data.startswith(b"\xef\xbb\xbf"):
        return "utf-8-sig"
    try:
        data.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        declared = _CODING.search(b"\n".join(data.split(b"\n", 2)[:2]))
        return declared.group(1).decode("ascii", "replace") if declared else "utf-8"


def _script(path: str, text: str) -> Document:
    cell = Cell(text, 1)
    cell.python = plain_newlines(text)
    _parse(cell)
    if cell.problem is None or cell.tree is not None:
        return Document(path, "python", [cell])
    plain = Cell(text, 1)
    _parse_notebook_cell(plain, cell.python)
    if plain.tree is not None:  # IPython code in a script: the error is reported, and all of it is checked
        plain.problem = cell.problem
        return Document(path, "python", [plain])
    return Document(path, "python", [cell, *_pieces(cell)])


def _pieces(cell: Cell) -> list[Cell]:
    """After a syntax error: the top-level pieces of the script that do parse, so that the error hides nothing else."""
    if len(cell.python) > MAX_SOURCE:
        return []
    lines = cell.python.split("\n")
    starts = [index for index, line in enumerate(lines) if _STATEMENT_START.match(line)]
    found: list[Cell] = []
    for start, end in pairwise([*starts, len(lines)]):
        piece = Cell("\n".join(lines[start:end]), start + 1)
        piece.python = piece.text
        _parse(piece)
        if piece.tree is not None:
            found.append(piece)
    return found


def _markdown(path: str, text: str) -> Document:
    lines = plain_newlines(text).split("\n")
    cells: list[Cell] = []
    index = 0
    while index < len(lines):
        found = _FENCE.match(lines[index])
        index += 1
        if not found:
            continue
        start, marks = index, found.group("marks")
        while index < len(lines) and not _closes(lines[index], marks):
            index += 1
        language = re.split(r"[\s{},.:]+", found.group("info").strip().lstrip("{."))[0].lower()
        if language in _PYTHON_FENCES:
            cell = Cell("\n".join(lines[start:index]), start + 1, indented=True)
            if ">>>" not in cell.text:  # a session with its printed results is not a program
                _parse_notebook_cell(cell, cell.text)
            cells.append(cell)
        index += 1
    return Document(path, "markdown", cells or [Cell("", 1)])


def _closes(line: str, marks: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(marks) and set(stripped) == {marks[0]}


def _notebook(path: str, data: bytes) -> Document:
    content = load_notebook(data)
    cells: list[Cell] = []
    line = 2  # leaves room above the first cell for the line that an indented cell needs
    for number, source in code_sources(content):
        length = sum(map(len, source or ()))
        cell = Cell("".join(source or ()) if length <= MAX_SOURCE else "", line, number, indented=True)
        if source is None:
            cell.problem = Problem("its source is not text", line, 0, unread=True)
        elif length > MAX_SOURCE:
            cell.problem = _too_long(length, line)
        else:
            _parse_notebook_cell(cell, plain_newlines(cell.text))
        cells.append(cell)
        line += len(cell.lines())
    metadata = content.get("metadata")
    return Document(
        path, "notebook", cells or [Cell("", 1, 1)], colab=isinstance(metadata, dict) and "colab" in metadata
    )


def load_notebook(data: bytes, decoder: json.JSONDecoder | None = None) -> dict[str, Any]:
    """The notebook's JSON; `decoder` lets the fixer keep the places of its strings."""
    start = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start in (b"[", b'"'):  # of many megabytes of it Python would make a gigabyte of objects
        raise Unreadable("it is JSON, but not a notebook: no list of cells in it")
    try:
        text = data.decode("utf-8-sig")
        content = json.loads(text) if decoder is None else decoder.decode(text)
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"it is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start})"
        ) from None
    except RecursionError:
        raise Unreadable("its JSON is nested too deeply") from None
    except ValueError as error:
        reason = str(error) if data.strip() else "the file is empty"
        raise Unreadable(f"it is not a notebook: {reason}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells", content.get("worksheets")), list):
        raise Unreadable("it is JSON, but not a notebook: no list of cells in it")
    return content


def code_sources(content: dict[str, Any]) -> list[tuple[int, list[str] | None]]:
    """Number and source parts of every Python code cell, in order; nbformat 3 keeps cells in worksheets.

    The parts are None for what should be a cell and is not written like one.
    """
    cells = content.get("cells")
    if not isinstance(cells, list):
        sheets = [sheet.get("cells") for sheet in content.get("worksheets", []) if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets if isinstance(sheet, list) for cell in sheet]
    metadata = content.get("metadata")
    kernel = metadata.get("kernelspec") if isinstance(metadata, dict) else None
    language = kernel.get("language") if isinstance(kernel, dict) else None
    if isinstance(language, str) and language.lower() not in ("python", "ipython", ""):
        return []
    found: list[tuple[int, list[str] | None]] = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
            found.append((number, None))
        elif cell["cell_type"] == "code" and cell.get("language", "python") in ("python", "ipython"):
            source = cell.get("source", cell.get("input"))
            parts: list[Any] = source if isinstance(source, list) else [source]
            found.append((number, parts if all(isinstance(part, str) for part in parts) else None))
    return found


def _parse_notebook_cell(cell: Cell, text: str) -> None:
    cell.python = text
    _parse(cell)  # what parses has no magics: none of them is valid Python
    if cell.tree is not None or len(text) > MAX_SOURCE:
        return
    cell.problem = None
    plain = strip_magics(text)
    cell.binds, cell.opaque, cell.shell = plain.binds, plain.opaque, plain.shell
    if plain.python is None:
        cell.python = ""
        return
    cell.python = plain.python
    _parse(cell)


def _tree(cell: Cell) -> ast.Module:
    """The syntax tree, with blank lines in front so that every node has its line in the document at no cost."""
    try:
        return ast.parse("\n" * (cell.first_line - 1) + cell.python)
    except IndentationError as error:
        if not cell.indented:
            raise
        try:  # IPython runs a cell that is indented as a whole; so does this, in the columns it has
            tree = ast.parse("\n" * (cell.first_line - 2) + "if 1:\n" + cell.python)
        except SyntaxError:
            raise error from None
    outer = tree.body[0]
    assert isinstance(outer, ast.If)
    tree.body[:1] = outer.body
    return tree


def _too_long(length: int, line: int) -> Problem:
    return Problem(
        f"it has {length:,} characters, and buoy reads up to {MAX_SOURCE:,} in one piece",
        line,
        0,
        unread=True,
    )


def _parse(cell: Cell) -> None:
    """Fill `tree` or `problem`."""
    if len(cell.python) > MAX_SOURCE:
        cell.problem = _too_long(len(cell.python), cell.first_line)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the code we read are not our business
            cell.tree = _tree(cell)
    except SyntaxError as error:
        cell.problem = _problem(cell, error)
    except (RecursionError, MemoryError):
        cell.problem = Problem("its code is nested too deeply", cell.first_line, 0, unread=True)
    except ValueError as error:  # null bytes
        cell.problem = Problem(str(error), cell.first_line, 0)


def _problem(cell: Cell, error: SyntaxError) -> Problem:
    """Where the parser stopped; behind the end (`for x in y:` and nothing more) the last line that has text."""
    lines = cell.lines()
    last = cell.first_line + len(lines) - 1
    line = min(max(error.lineno or cell.first_line, cell.first_line), last)
    column = max(0, (error.offset or 1) - 1)
    if "too many nested" in (error.msg or "") or "too complex" in (error.msg or ""):
        return Problem("its code is nested too deeply", line, column, unread=True)
    while line > cell.first_line and not lines[line - cell.first_line].strip():
        line -= 1
        column = len(lines[line - cell.first_line].rstrip())
    return Problem(error.msg or "invalid syntax", line, column)


@dataclass(frozen=True, slots=True)
class MagicCode:
    """What such a call runs."""

    statements: list[ast.stmt] = field(default_factory=list)
    """They stand where the call stands; empty when there is no Python in it."""
    opaque: bool = False
    """It may define anything."""


def read_magic(node: ast.Call) -> MagicCode:
    """Read a call of `run_cell_magic`, `run_line_magic` or `magic` as the notebook's cell was."""
    words = [
        item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
    if len(words) != len(node.args) or not words:
        return MagicCode()
    kind = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    head = "%%" if kind == "run_cell_magic" else "%"
    plain = strip_magics(head + " ".join(words[:2]) + ("\n" + words[2] if len(words) > 2 else ""))
    try:
        tree = ast.parse(plain.python or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return MagicCode(opaque=plain.opaque)
    for inner in ast.walk(tree):
        for place in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(inner, place):
                setattr(inner, place, getattr(node, place))
    return MagicCode(tree.body, plain.opaque)
