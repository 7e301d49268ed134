"""The runs below a folder, as numbers and as a table."""

from __future__ import annotations

import os
import shlex
import time
from typing import Any, NamedTuple

from buoy.checkpoint.store import Store
from buoy.fields import count, mapping, number
from buoy.flight.attempt import Attempt, attempts_of, is_run, missing_of
from buoy.flight.beacon import read_beacon
from buoy.flight.log import read_events
from buoy.machine.files import read_json
from buoy.text import joined, printable
from buoy.units import format_bytes, format_duration
from buoy.verdict.advice import FINISHED, NOT_BEGUN
from buoy.verdict.notebook import STORIES, part_of
from buoy.view.history import is_alive, state_of_living, state_of_unjudged

SCHEMA = "buoy.runs/1"


def find_runs(folder: str) -> list[str]:
    """Run folders in this folder and in its `runs/`."""
    if is_run(folder):
        return [folder]
    found = []
    for place in (folder, os.path.join(folder, "runs")):
        try:
            found += [entry.path for entry in os.scandir(place) if is_run(entry.path)]
        except OSError:
            continue
    return found


def listed(folder: str) -> list[dict[str, Any]]:
    """The runs that are to be found here, the newest first."""
    runs = [_described(run) for run in find_runs(folder)]
    return sorted(runs, key=lambda run: run["touched"] or 0.0, reverse=True)


def _described(run: str) -> dict[str, Any]:
    """One that cannot be read hides none of the others."""
    try:
        return describe(run)
    except Exception as error:  # noqa: BLE001 - said in its line
        words = f"this run cannot be read ({type(error).__name__}: {error}); please report it"
        return {
            "run": run, "name": os.path.basename(run), "attempts": None, "status": "not known", "step": None,
            "alive": False, "checkpoints": 0, "checkpoint_step": None, "finished": False, "bytes": None,
            "touched": None, "missing": [words],
        }  # fmt: skip


def describe(run: str) -> dict[str, Any]:
    """One run: how it stands, what it holds."""
    attempts = attempts_of(run)
    missing = missing_of(run)
    last = (
        _last_of(attempts, run)
        if attempts
        else _Words("not known" if missing else "never started", is_told=False)
    )
    entries = [entry for entry in Store(run).list() if entry.complete]
    newest = entries[0] if entries else None
    is_finished = bool(newest and newest.about.get("finished"))
    # Opened once more, and there was nothing left to do; or the log lost its end.
    if is_finished and not last.is_told:
        last = last._replace(status=FINISHED, step=newest.step if newest else None)
    return {
        "run": run,
        "name": os.path.basename(run),
        "attempts": len(attempts) if attempts or not missing else None,
        "status": STORIES.get(last.status, last.status),
        "step": last.step,
        "alive": last.alive,
        "checkpoints": len(entries),
        "checkpoint_step": newest.step if newest else None,
        "finished": is_finished or (last.status == "clean-exit" and not entries),
        "bytes": _bytes(run),
        "touched": last.wall if attempts else _newest_write(run),
        "missing": missing,
    }


def recorded_in(run: str) -> list[str]:
    """The other runs that attempts of this one recorded, as long as they are there and point to it."""
    run, found = os.path.abspath(run), list[str]()
    for attempt in [each for each in attempts_of(run) if each.run_folder == run]:
        for event in read_events(attempt.folder):
            name = event.get("run") if event.get("kind") == "opened" else None
            other = os.path.normpath(os.path.join(attempt.run_folder, name)) if isinstance(name, str) else run
            if other not in (*found, run) and attempt in attempts_of(other):
                found.append(other)
    return found


def table(runs: list[dict[str, Any]]) -> str:
    """The list for users; the first column is what the other verbs take, typed from here."""
    heads = ("run", "state", "attempts", "step", "checkpoints", "size", "last seen")
    rows = [heads, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [f"{shown(run['run'])}: {'; '.join(run['missing'])}" for run in runs if run["missing"]]
    return joined(lines)


def shown(run: str) -> str:
    """A run folder as one types it here."""
    path = os.path.relpath(run)
    path = run if path.startswith(os.pardir) else path
    return shlex.quote(path) if path.isprintable() else printable(path, 80)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    kept = f"{run['checkpoints']}, newest step {run['checkpoint_step']}" if run["checkpoints"] else "none"
    seen = run["touched"]
    return (
        shown(run["run"]),
        printable(run["status"], 24),
        "n/a" if run["attempts"] is None else str(run["attempts"]),
        "n/a" if run["step"] is None else str(run["step"]),
        kept,
        format_bytes(run["bytes"]),
        f"{format_duration(max(0.0, time.time() - seen))} ago" if seen is not None else "n/a",
    )


class _Words(NamedTuple):
    status: str
    step: int | None = None
    alive: bool = False
    """Whether its process lives: a notebook's kernel does after its training is done."""
    wall: float | None = None
    """The last sign of life; None when none can be seen."""
    is_told: bool = True
    """Whether the log is the run's own, or tells of its training."""


def _last_of(attempts: list[Attempt], run: str) -> _Words:
    """How the last attempt that did a step of this run stands; one that only opened it again ended nothing."""
    newest = last = _last_words(attempts[-1], run)
    for attempt in reversed(attempts[:-1]):
        if last.status != NOT_BEGUN:
            break
        last = _last_words(attempt, run)
    return last._replace(alive=newest.alive)


def _last_words(attempt: Attempt, run: str) -> _Words:
    """How the run stands, by the last attempt that recorded it: the run's own story before its process's."""
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    events = read_events(attempt.folder)
    is_other = os.path.realpath(run) != os.path.realpath(attempt.run_folder)
    beacon = read_beacon(os.path.join(attempt.folder, f"process-{about.get('pid')}", "beacon"))
    step, phase = (beacon.step, beacon.phase) if beacon is not None else (None, None)
    verdict = read_json(os.path.join(attempt.folder, "verdict.json"))
    alive = verdict is None and is_alive(about)
    own, story = part_of(run, attempt.run_folder, events, about, step, phase, verdict is not None)
    is_told = own.began or not is_other
    if story is not None:
        wall = number((own.ended or {}).get("wall")) or _newest_write(run)
        return _Words(story, own.step, alive, wall, is_told)
    wall = _newest_write(attempt.folder)
    if alive:
        step = step or None
        status = state_of_living(about, events, step, phase)
    elif verdict is None:
        status, step = state_of_unjudged(attempt)
    else:
        status = str(mapping(verdict.get("cause")).get("id", "ended"))
        step = count(mapping(verdict.get("where")).get("step"))
    return _Words(status, own.step if own.is_beside else step, alive, wall, is_told)


def _newest_write(folder: str) -> float | None:
    try:
        return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=None)
    except OSError:
        return None


def _bytes(folder: str) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
