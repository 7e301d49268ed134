"""Findings of `buoy check`: full and concise text, JSON, GitHub annotations, SARIF 2.1.0, and a table in a notebook."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any, TextIO, overload

from buoy.errors import UsageError, in_notebook
from buoy.lint import engine, rules
from buoy.lint.engine import Report
from buoy.lint.model import Diagnostic, Edit, Place
from buoy.lint.target import target_for
from buoy.text import visible
from buoy.view import wants_colour

_COLOURS = {"error": "31", "warning": "33", "note": "36", "bold": "1", "dim": "2"}
_WIDEST = 160


class Paint:
    """Colour where it is wanted."""

    def __init__(self, stream: TextIO) -> None:
        self.on = wants_colour(stream)

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
    """The last line: how many of each, and what `--fix` would fix (of files: a notebook's cells are in memory)."""
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
    mend = f"; {safe} fixable with `--fix`" if safe else ""
    mend += f"; {unsafe} more with `--unsafe-fixes`" if unsafe else ""
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
    # What is checked here is mostly the cells as they were run: there is no file that could be fixed.
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


SCHEMA = "buoy.check/1"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def as_json(report: Report) -> str:
    """Everything, with a schema version."""
    content = {
        "schema": SCHEMA,
        "files": report.files,
        "findings": [_plain(item) for item in report.diagnostics],
    }
    return json.dumps(content, indent=1) + "\n"


def _plain(item: Diagnostic) -> dict[str, Any]:
    fix = None
    if item.fix is not None:
        fix = {
            "title": item.fix.title,
            "safety": item.fix.safety,
            "edits": [_edit(edit, item) for edit in item.fix.edits],
        }
    return {
        "path": item.path,
        "code": item.code,
        "name": item.name,
        "severity": item.severity,
        "message": item.message,
        "hint": item.hint,
        "start": _place(item.start),
        "end": _place(item.end),
        "fingerprint": item.fingerprint,
        "explain": f"buoy explain {item.code}",
        "fix": fix,
    }


def _place(place: Place) -> dict[str, int | None]:
    return {"cell": place.cell, "line": place.line, "column": place.column}


def _edit(edit: Edit, item: Diagnostic) -> dict[str, Any]:
    # A fix stays in the finding's cell, and so does its numbering.
    span, offset = edit.span, item.span.line - item.start.line
    return {
        "line": span.line - offset,
        "column": span.column + 1,
        "end_line": span.end_line - offset,
        "end_column": span.end_column + 1,
        "text": edit.text,
    }


def github(report: Report) -> str:
    """One workflow command per finding, which GitHub shows beside the line."""
    lines = []
    for item in report.diagnostics:
        where = f"file={_property(item.path)}"
        if item.start.cell is None:  # GitHub cannot point into a cell
            where += f",line={item.start.line},col={item.start.column},endLine={item.end.line}"
        title = _property(f"{item.code} {item.name}")
        cell = f"cell {item.start.cell}, line {item.start.line}: " if item.start.cell is not None else ""
        lines.append(
            f"::{_GITHUB[item.severity]} title={title},{where}::{_data(cell + item.message + ' hint: ' + item.hint)}"
        )
    return "".join(line + "\n" for line in lines)


def _data(text: str) -> str:
    return visible(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(report: Report) -> str:
    """A SARIF 2.1.0 log for code scanning."""
    from buoy import __version__

    codes = sorted({item.code for item in report.diagnostics})
    run = {
        "tool": {
            "driver": {"name": "buoy", "version": __version__, "rules": [_rule(code) for code in codes]}
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(item, codes) for item in report.diagnostics],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(code: str) -> dict[str, Any]:
    rule = rules.rule(code)
    return {
        "id": code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "help": {"text": f"`buoy explain {code}` prints its page."},
    }


def _result(item: Diagnostic, codes: list[str]) -> dict[str, Any]:
    cell = f"cell {item.start.cell}, line {item.start.line}: " if item.start.cell is not None else ""
    region = {"startLine": item.start.line, "startColumn": item.start.column}
    if item.start.cell is None:
        region |= {"endLine": max(item.end.line, item.start.line), "endColumn": item.end.column}
    else:
        # A line inside a cell is no line of the .ipynb file; the message says which cell.
        region = {"startLine": 1}
    location = {"physicalLocation": {"artifactLocation": {"uri": _uri(item.path)}, "region": region}}
    return {
        "ruleId": item.code,
        "ruleIndex": codes.index(item.code),
        "level": item.severity,
        "message": {"text": f"{cell}{item.message}. {item.hint}"},
        "locations": [location],
        "partialFingerprints": {"buoy/v1": item.fingerprint},
    }


def _uri(path: str) -> str:
    from urllib.parse import quote

    return quote(os.fsencode("stdin" if path == "-" else path.replace(os.sep, "/")))


_COLOUR = {"error": "#b3261e", "warning": "#8a5a00", "note": "#4a5a6a"}


class Findings(Sequence[Diagnostic]):
    """What `buoy.check` found: a sequence that prints itself, as text or as HTML."""

    def __init__(self, report: engine.Report) -> None:
        self.report = report

    def __len__(self) -> int:
        return len(self.report.diagnostics)

    @overload
    def __getitem__(self, index: int) -> Diagnostic: ...
    @overload
    def __getitem__(self, index: slice) -> list[Diagnostic]: ...
    def __getitem__(self, index: int | slice) -> Diagnostic | list[Diagnostic]:
        return self.report.diagnostics[index]

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.report.diagnostics)

    def __repr__(self) -> str:
        import io

        return full(self.report, Paint(io.StringIO())).rstrip("\n")

    def _repr_html_(self) -> str:
        from buoy.view.cards import chip

        rows = "".join(
            f"<tr><td style='text-align:left;white-space:nowrap'>{escape(location(item))}</td>"
            f"<td style='white-space:nowrap'>{chip(item.severity, _COLOUR[item.severity])} {item.code}</td>"
            f"<td style='text-align:left'>{escape(item.message)}<br><small>hint: {escape(item.hint)}</small></td></tr>"
            for item in self.report.diagnostics
        )
        return f"<div><table>{rows}</table><p>{escape(summary(self.report))}</p></div>"


def check(
    *paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    on: str | Sequence[str] = (),
    select: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
) -> Findings:
    """Check scripts, notebooks or folders, and return what was found. Settings files are not read.

    >>> with open("train.py", "w") as file:
    ...     _ = file.write("import torch\\ntorch.save(modle.state_dict(), 'model.pt')\\n")
    >>> [finding.code for finding in check("train.py")]
    ['BY102']
    """
    named = [
        os.fspath(path)
        for given in paths
        for path in ([given] if isinstance(given, str | os.PathLike) else given)
    ]
    if not named:
        raise UsageError(
            "nothing to check", expected="a script, a notebook or a folder", hint='`buoy.check("train.py")`'
        )
    target = target_for(_words(on))
    codes = rules.choose(_words(select), _words(ignore))
    return Findings(engine.check_files(engine.find_files(named), target, codes))


def check_cells(name: str, sources: Sequence[str]) -> Findings:
    """Check what was run in a notebook: `cell 3` of a finding is the third of the sources."""
    cell: dict[str, object] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [{**cell, "source": text} for text in sources]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    found = engine.check_source(name, json.dumps(notebook).encode(), target_for([]), rules.choose([], []))
    return Findings(engine.Report(found, cells=len(sources)))


def _words(given: str | Sequence[str]) -> list[str]:
    """`"BY1, BY2"` and `["BY1", "BY2"]` alike."""
    return given.replace(",", " ").split() if isinstance(given, str) else list(given)
