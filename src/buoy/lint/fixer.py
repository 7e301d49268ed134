"""Applies fixes to a file's bytes: only the source under the finding changes, and what parsed before parses after."""

from __future__ import annotations

import errno
import json
import json.decoder
import json.scanner
import os
import re
from collections.abc import Sequence
from typing import Any

from buoy.lint.document import Document
from buoy.lint.model import Diagnostic, Edit
from buoy.lint.sources import Unreadable, code_sources, decode, encoding_of, load_notebook, read_document

_LINE_END = re.compile(r"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


def fixable(diagnostics: Sequence[Diagnostic], unsafe: bool) -> list[Diagnostic]:
    """Those that `--fix` (or `--unsafe-fixes`) would mend."""
    wanted = ("safe", "unsafe") if unsafe else ("safe",)
    return [item for item in diagnostics if item.fix is not None and item.fix.safety in wanted]


def apply(
    path: str, data: bytes, diagnostics: Sequence[Diagnostic], unsafe: bool
) -> tuple[bytes, list[Diagnostic]]:
    """The mended bytes, and what was mended; a fix that would not parse as well as before is left out.

    Overlapping fixes wait for the next round: the caller checks again until nothing is left to mend.
    """
    document = read_document(path, data)
    chosen: list[Diagnostic] = []
    for item in fixable(diagnostics, unsafe):
        if not any(_overlap(new, old) for new in _edits([item]) for old in _edits(chosen)):
            chosen.append(item)
    return _soundest(document, data, [], chosen)


def _soundest(
    document: Document, data: bytes, good: list[Diagnostic], chosen: list[Diagnostic]
) -> tuple[bytes, list[Diagnostic]]:
    """As many of the chosen as can be applied together; halved until the one that cannot stands alone."""
    mended = _mended(document, data, _edits([*good, *chosen]))
    if mended is not None and _as_sound(document, mended):
        return mended, [*good, *chosen]
    if len(chosen) > 1:
        half = len(chosen) // 2
        _, good = _soundest(document, data, good, chosen[:half])
        return _soundest(document, data, good, chosen[half:])
    return (_mended(document, data, _edits(good)) or data, good) if chosen else (data, good)


def _mended(document: Document, data: bytes, edits: list[Edit]) -> bytes | None:
    if not edits:
        return data
    return _notebook(document, data, edits) if document.kind == "notebook" else _text(data, edits)


def _edits(diagnostics: list[Diagnostic]) -> list[Edit]:
    """Their edits, each once: two findings may ask for the same import."""
    return list(dict.fromkeys(edit for item in diagnostics if item.fix for edit in item.fix.edits))


def write(path: str, data: bytes) -> None:
    """Replace a file whole or not at all, keeping its mode; a link stays a link."""
    real = os.path.realpath(path)
    mode = os.stat(real).st_mode
    if not mode & 0o222:  # a new file could take its place all the same: that is not what read-only means
        raise PermissionError(errno.EACCES, "the file is read-only")
    beside = f"{real}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, mode & 0o7777)
        os.replace(beside, real)
    except OSError:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def _overlap(first: Edit, second: Edit) -> bool:
    one, two = first.span, second.span
    return (one.line, one.column) < (two.end_line, two.end_column) and (two.line, two.column) < (
        one.end_line,
        one.end_column,
    )


def _as_sound(before: Document, data: bytes) -> bool:
    """Whether every cell that parsed still does, and no cell came or went."""
    try:
        after = read_document(before.path, data)
    except Unreadable:
        return False
    if len(after.cells) != len(before.cells):
        return False
    return all(
        new.tree is not None
        for old, new in zip(before.cells, after.cells, strict=True)
        if old.tree is not None
    )


def _text(data: bytes, edits: list[Edit]) -> bytes | None:
    text, encoding = decode(data), encoding_of(data)
    try:
        if text.encode(encoding) != data:
            return None  # not every byte would come back as it was
        return _edited(text, edits, first_line=1).encode(encoding)
    except UnicodeEncodeError:
        return None


def _edited(text: str, edits: list[Edit], first_line: int) -> str:
    ends = [match.span() for match in _LINE_END.finditer(text)]
    starts = [0, *(end for _, end in ends)]
    newline = text[ends[0][0] : ends[0][1]] if ends else "\n"
    for edit in sorted(edits, key=lambda item: (item.span.line, item.span.column), reverse=True):
        start = starts[edit.span.line - first_line] + edit.span.column
        end = starts[edit.span.end_line - first_line] + edit.span.end_column
        text = text[:start] + edit.text.replace("\n", newline) + text[end:]
    return text


class _Located(str):
    """A JSON string that knows where its literal stands in the file."""

    start: int
    end: int


def _located_string(text: str, end: int, strict: bool = True) -> tuple[_Located, int]:
    value, stop = json.decoder.scanstring(text, end, strict)  # type: ignore[attr-defined]
    found = _Located(value)
    found.start, found.end = end - 1, stop
    return found, stop


def _notebook(document: Document, data: bytes, edits: list[Edit]) -> bytes | None:
    prefix = _BOM if data.startswith(_BOM) else b""
    text = data.decode("utf-8-sig")
    decoder: Any = json.JSONDecoder()
    decoder.parse_string = _located_string
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    sources = code_sources(load_notebook(data, decoder))
    changes: list[tuple[int, int, str]] = []
    for cell, (_, parts) in zip(document.cells, sources, strict=True):
        last = cell.first_line + len(cell.lines()) - 1
        own = [edit for edit in edits if cell.first_line <= edit.span.line <= last]
        if not own or parts is None:
            continue
        located = [part for part in parts if isinstance(part, _Located)]
        if len(located) != len(parts) or any(edit.span.end_line > last for edit in own):
            return None
        change = _replace_parts(text, located, _edited(cell.text, own, cell.first_line))
        if change is None:
            return None
        changes.append(change)
    for start, end, literal in sorted(changes, reverse=True):
        text = text[:start] + literal + text[end:]
    return prefix + text.encode("utf-8")


def _replace_parts(text: str, parts: list[_Located], source: str) -> tuple[int, int, str] | None:
    """The change that turns a cell's string literals into the new source, touching only the lines that differ."""
    ascii_only = text.isascii()
    in_list = text[: parts[0].start].rstrip().endswith("[")
    if len(parts) == 1 and not (in_list and "\n" in source and "\n" not in parts[0].removesuffix("\n")):
        return parts[0].start, parts[0].end, json.dumps(source, ensure_ascii=ascii_only)
    # However the file cuts the source into strings: those at both ends that still fit stay as they are.
    head, start = 0, 0
    while head < len(parts) and source.startswith(parts[head], start):
        start += len(parts[head])
        head += 1
    tail, end = 0, len(source)
    while tail < len(parts) - head and end - len(parts[-1 - tail]) >= start:
        if not source.endswith(parts[-1 - tail], start, end):
            break
        end -= len(parts[-1 - tail])
        tail += 1
    old = parts[head : len(parts) - tail]
    new = [line + "\n" for line in source[start:end].split("\n")]
    new[-1] = new[-1].removesuffix("\n")
    new = [line for line in new if line]
    between = (
        text[parts[0].end : parts[1].start] if len(parts) > 1 else "," + _space_before(text, parts[0].start)
    )
    literals = between.join(json.dumps(line, ensure_ascii=ascii_only) for line in new)
    if old and new:
        return old[0].start, old[-1].end, literals
    if new and head < len(parts):  # nothing replaced: put in front of the part that follows
        return parts[head].start, parts[head].start, literals + between
    if new:
        return parts[-1].end, parts[-1].end, between + literals
    if head + len(old) < len(parts):  # lines taken out: their separators go with them
        return old[0].start, parts[head + len(old)].start, ""
    return (parts[head - 1].end, old[-1].end, "") if head else None


def _space_before(text: str, position: int) -> str:
    start = position
    while start and text[start - 1] in " \t\r\n":
        start -= 1
    return text[start:position]
