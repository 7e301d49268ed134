"""`buoy.check(path)`: findings as values, which a notebook shows as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from typing import overload

from buoy.errors import UsageError
from buoy.lint import engine, rules
from buoy.lint.model import Diagnostic
from buoy.lint.target import target_for

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

        from buoy.view.findings import Paint, full

        return full(self.report, Paint(io.StringIO())).rstrip("\n")

    def _repr_html_(self) -> str:
        from buoy.view.card import chip
        from buoy.view.findings import location, summary

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
