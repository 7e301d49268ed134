"""Findings for machines: JSON, GitHub annotations, SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from typing import Any

from buoy.lint import rules
from buoy.lint.engine import Report
from buoy.lint.model import Diagnostic, Edit, Place
from buoy.text import visible

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
