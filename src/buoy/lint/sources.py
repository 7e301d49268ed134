"""From bytes to a Document: scripts, notebooks (nbformat 3 and 4), Markdown fences. Nothing here
raises on bad input.
"""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
from itertools import pairwise
from typing import Any

from buoy.lint.document import MAX_SOURCE, Cell, Document, Problem, plain_newlines
from buoy.lint.magics import strip_magics

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
    encoding = encoding_of(data)
    try:
        return data.decode(encoding)
    except (LookupError, UnicodeDecodeError):
        pass
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"it is not UTF-8 text (byte 0x{data[error.start]:02x} in line {line})") from None
    return data.decode("utf-8")


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
