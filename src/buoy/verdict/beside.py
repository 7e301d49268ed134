"""Two attempts of one run at the same time: who asks about the last may mean the other."""

from __future__ import annotations

import os
import shlex

from buoy.flight.attempt import attempt_numbers, read_json
from buoy.verdict.model import Verdict
from buoy.verdict.values import mapping, number, printable, text

_MOST = 8
"""Attempts that are looked at, newest first."""


def lived_beside(verdict: Verdict, run: str) -> str | None:
    """A line about another attempt that ended during or after this one and did not end well."""
    if verdict.wall is None or verdict.ran_for is None:
        return None
    began = verdict.wall - verdict.ran_for
    for other in reversed(attempt_numbers(verdict.run)[-_MOST:]):
        if other == verdict.attempt:
            continue
        record = read_json(os.path.join(verdict.run, "attempts", f"{other:04d}", "verdict.json")) or {}
        ended, cause = number(record.get("wall")), text(mapping(record.get("cause")).get("id"))
        if ended is None or cause is None or ended <= began:
            continue
        if ended > verdict.wall or (cause != "clean-exit" and verdict.cause.id == "clean-exit"):
            name = shlex.quote(printable(run, 60))
            return f"attempt {other} ran at the same time and ended with {cause}: `buoy why {name} --attempt {other}`"
    return None
