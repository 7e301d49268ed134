"""The runs below a folder, as numbers and as a table."""

from __future__ import annotations

import os
import time
from typing import Any

from buoy.checkpoint.store import Store
from buoy.errors import RunFolderError
from buoy.flight.attempt import attempt_numbers, find_attempt, is_run, read_json
from buoy.units import format_bytes, format_duration
from buoy.verdict.values import printable

SCHEMA = "buoy.runs/1"


def find_runs(folder: str) -> list[str]:
    """Run folders in this folder and in its `runs/`, the newest first."""
    if is_run(folder):
        return [folder]
    found = []
    for place in (folder, os.path.join(folder, "runs")):
        try:
            found += [entry.path for entry in os.scandir(place) if entry.is_dir() and is_run(entry.path)]
        except OSError:
            continue
    return sorted(found, key=_touched, reverse=True)


def describe(run: str) -> dict[str, Any]:
    """One run: how it stands, what it holds."""
    numbers = attempt_numbers(run)
    status, step = "never started", None
    try:
        status, step = _last_words(find_attempt(run).folder)
    except RunFolderError:
        pass
    entries = [entry for entry in Store(run).list() if entry.complete]
    newest = entries[0] if entries else None
    attempts = len(numbers)
    if not numbers:  # recorded by a notebook's kernel, which lives on when this training is done
        attempts = len((read_json(os.path.join(run, "run.json")) or {}).get("recorded") or ())
        status = "finished" if newest and newest.about.get("finished") else status
    return {
        "run": run,
        "name": os.path.basename(run),
        "attempts": attempts,
        "status": status,
        "step": step,
        "checkpoints": len(entries),
        "checkpoint_step": newest.step if newest else None,
        "finished": bool(newest and newest.about.get("finished")) or (status == "clean-exit" and not entries),
        "bytes": _bytes(run),
        "touched": _touched(run),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """The list for people."""
    heads = ("run", "state", "attempts", "step", "checkpoints", "size", "last seen")
    rows = [heads, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    kept = f"{run['checkpoints']}, newest step {run['checkpoint_step']}" if run["checkpoints"] else "none"
    return (
        printable(run["name"], 40),
        printable(run["status"], 24),
        str(run["attempts"]),
        "n/a" if run["step"] is None else str(run["step"]),
        kept,
        format_bytes(run["bytes"]),
        format_duration(max(0.0, time.time() - run["touched"])) + " ago",
    )


def _last_words(folder: str) -> tuple[str, int | None]:
    verdict = read_json(os.path.join(folder, "verdict.json"))
    if verdict is None:
        alive = time.time() - _newest_write(folder) < 30.0
        return ("running" if alive else "no verdict yet"), None
    cause, where = verdict.get("cause"), verdict.get("where")
    step = where.get("step") if isinstance(where, dict) else None
    name = str(cause.get("id", "ended")) if isinstance(cause, dict) else "ended"
    return name, step if isinstance(step, int) else None


def _newest_write(folder: str) -> float:
    try:
        return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=0.0)
    except OSError:
        return 0.0


def _touched(run: str) -> float:
    numbers = attempt_numbers(run)
    return _newest_write(os.path.join(run, "attempts", f"{numbers[-1]:04d}") if numbers else run)


def _bytes(folder: str) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
