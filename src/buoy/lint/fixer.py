"""`--fix` and `--diff`: edits the source under a finding and nothing else; what parsed before parses after."""

from __future__ import annotations

import errno
import json
import json.decoder
import json.scanner
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from buoy.lint import engine
from buoy.lint.engine import Report
from buoy.lint.model import Diagnostic, Edit
from buoy.lint.sources import (
    Document,
    Unreadable,
    code_sources,
    decode,
    encoding_of,
    load_notebook,
    read_document,
)
from buoy.lint.target import Target
from buoy.machine.files import write_whole
from buoy.text import joined, visible

_LINE_END = re.compile(r"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


def fixable(diagnostics: Sequence[Diagnostic], unsafe: bool) -> list[Diagnostic]:
    """Those that `--fix` (or `--unsafe-fixes`) would fix."""
    wanted = ("safe", "unsafe") if unsafe else ("safe",)
    return [item for item in diagnostics if item.fix is not None and item.fix.safety in wanted]


def apply(
    path: str, data: bytes, diagnostics: Sequence[Diagnostic], unsafe: bool
) -> tuple[bytes, list[Diagnostic]]:
    """The fixed bytes, and what was fixed; a fix that would not parse as well as before is left out.

    Overlapping fixes wait for the next round: the caller checks again until nothing is left to fix.
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
    fixed = _fixed(document, data, _edits([*good, *chosen]))
    if fixed is not None and _as_sound(document, fixed):
        return fixed, [*good, *chosen]
    if len(chosen) > 1:
        half = len(chosen) // 2
        _, good = _soundest(document, data, good, chosen[:half])
        return _soundest(document, data, good, chosen[half:])
    return (_fixed(document, data, _edits(good)) or data, good) if chosen else (data, good)


def _fixed(document: Document, data: bytes, edits: list[Edit]) -> bytes | None:
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
    write_whole(real, data, sync=True, mode=mode & 0o7777)
    with suppress(OSError):  # what the umask took; a mounted drive may know no modes
        os.chmod(real, mode & 0o7777)


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
        changes.append(_replace_parts(text, located, _edited(cell.text, own, cell.first_line)))
    for start, end, literal in sorted(changes, reverse=True):
        text = text[:start] + literal + text[end:]
    try:
        return prefix + text.encode("utf-8")
    except UnicodeEncodeError:  # half of a pair, written as an escape
        return None


def _replace_parts(text: str, parts: list[_Located], source: str) -> tuple[int, int, str]:
    """The change that gives a cell its new source, as one string or a list of lines, separated as they were."""
    ascii_only, start, end = text.isascii(), parts[0].start, parts[-1].end
    before = text[:start].rstrip()
    if not before.endswith("["):
        return start, end, json.dumps(source, ensure_ascii=ascii_only)
    between = text[parts[0].end : parts[1].start] if len(parts) > 1 else "," + text[len(before) : start]
    lines = [line for line in re.split(r"(?<=\n)", source) if line]
    return start, end, between.join(json.dumps(line, ensure_ascii=ascii_only) for line in lines)


_MOST_ROUNDS = 10


@dataclass(slots=True)
class Outcome:
    """What `--fix` did."""

    fixed: int = 0
    """Findings fixed, or that would be."""
    unwritten: bool = False
    """A fixed file could not be written."""


def fix(
    report: Report, target: Target, codes: set[str], *, unsafe: bool, diff: bool
) -> tuple[Report, Outcome]:
    """Fix the files of a report, or show the changes (`diff`); the report of what is left."""
    left, outcome = Report(files=report.files), Outcome()
    for path, found in groupby(report.diagnostics, key=lambda item: item.path):
        diagnostics = list(found)
        if fixable(diagnostics, unsafe):
            diagnostics = _fix_file(path, diagnostics, target, codes, unsafe, diff, outcome)
        left.diagnostics += diagnostics
    verb = "would fix" if diff else "fixed"
    sys.stderr.write(f"{verb} {outcome.fixed} finding{'s' if outcome.fixed != 1 else ''}\n")
    return left, outcome


def _fix_file(
    path: str,
    found: list[Diagnostic],
    target: Target,
    codes: set[str],
    unsafe: bool,
    diff: bool,
    outcome: Outcome,
) -> list[Diagnostic]:
    left, done = found, 0
    try:
        before = data = engine.read_file(path)
        for _ in range(_MOST_ROUNDS):
            data, fixed = apply(path, data, left, unsafe)
            if not fixed:
                break
            done += len(fixed)
            left = engine.check_source(path, data, target, codes)
        if data != before and not diff:
            write(path, data)
    except Unreadable as error:
        sys.stderr.write(f"buoy: {visible(path)} was not fixed: {error}\n")
        return found
    except OSError as error:
        sys.stderr.write(
            f"buoy: {visible(path)} was not fixed: {error.strerror}; `--diff` shows the change\n"
        )
        outcome.unwritten = True
        return found
    if data != before and diff:
        _show(path, before, data)
    outcome.fixed += done
    # A fix that was tried and did not fit is offered no more.
    return [replace(item, fix=None) if fixable([item], unsafe) else item for item in left]


def _show(path: str, before: bytes, after: bytes) -> None:
    """Print a patch, byte for byte, so that `patch -p0` and `git apply -p0` take it; for a terminal one to read."""
    # Each byte as a character, so that no encoding and no exotic line end gets in the way.
    old, new = (data.decode("latin-1") for data in (before, after))
    text = "".join(_patch(_file_name(path), old, new)).encode("latin-1")
    sys.stdout.flush()
    if sys.stdout.isatty():
        sys.stdout.write(joined(text.decode("utf-8", "replace").split("\n")))
        return
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is not None:
        buffer.write(text)
    else:
        sys.stdout.write(text.decode("utf-8", "replace"))


def _file_name(path: str) -> str:
    """As patches write it, a character for each byte: with quotes and C's escapes where it is no plain name."""
    name = os.fsencode(path).decode("latin-1")
    if path.isprintable():
        return name
    return '"' + name.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def _patch(path: str, old: str, new: str) -> Iterator[str]:
    from difflib import unified_diff

    for line in unified_diff(_lines(old), _lines(new), path, path):
        yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """Cut at line feeds alone, as `patch` does."""
    pieces = text.split("\n")
    return [piece + "\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
