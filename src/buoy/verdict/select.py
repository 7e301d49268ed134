"""Which run and which attempt a question is about: what is named, else the run that the process was training."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from buoy.errors import RunFolderError
from buoy.fields import mapping, number, text
from buoy.flight.attempt import (
    Attempt,
    attempts_of,
    find_attempt,
    find_run,
    is_run,
    lost_recording,
)
from buoy.flight.beacon import Reading, read_beacon
from buoy.flight.log import read_events
from buoy.flight.trainings import training_of
from buoy.machine.files import read_json
from buoy.text import printable
from buoy.verdict import Verdict, verdict_on
from buoy.verdict.advice import FINISHED, LEFT, NOT_BEGUN, UNSAVED, from_here
from buoy.verdict.notebook import part_of


class Asked(NamedTuple):
    """An attempt, and whose part in it is asked for."""

    attempt: Attempt
    run: str
    """The run's folder; the recording's own where none of its runs is known."""
    of_process: bool
    """Whether the end of the process is meant, whatever became of this run's training before that."""


def asked_for(run: str | None = None, number: int | None = None) -> Asked:
    """What a user means by a run (None, or a folder of runs: the newest) and an attempt (None: the last)."""
    own = _recorded_here() if run is None else None
    attempt, folder = find_attempt(own or run, number), find_run(own or run)
    if not _names_one(run):
        return Asked(attempt, concerned(attempt), True)
    was_chosen = number is not None or os.path.basename(os.path.normpath(run or "")).isdigit()
    asked = part_in(attempt, folder)
    holds_it = os.path.realpath(folder) == os.path.realpath(attempt.run_folder)
    return asked._replace(of_process=asked.of_process or (holds_it and was_chosen))


def part_in(attempt: Attempt, folder: str) -> Asked:
    """What the run in this folder is asked about an attempt: of a folder that only holds the recording, its process."""
    holds_it = os.path.realpath(folder) == os.path.realpath(attempt.run_folder)
    return Asked(attempt, folder, holds_it and not _took_part(attempt, folder))


def _recorded_here() -> str | None:
    """Where this process itself is recorded, if no run can be found from its working directory any more."""
    try:
        find_run()
    except RunFolderError:
        there = sys.modules.get("buoy.flight.recorder")
        recorder = there.current() if there is not None else None
        return recorder.folder if recorder is not None else None
    return None


def concerned(attempt: Attempt) -> str:
    """The folder of the run that this attempt's process is at, or was at in the end.

    That is the run that was made or trained last, unless that one had ended before the process did. Steps that were
    counted after the last training are those of a loop without a run: then it is the recording's own folder.
    """
    about, beacon = _main_process(attempt)
    events = read_events(attempt.folder)
    step, phase = (beacon.step, beacon.phase) if beacon is not None else (None, None)
    is_over = any(os.path.exists(os.path.join(attempt.folder, name)) for name in ("death.json", "exit.json"))
    made = [str(event.get("run")) for event in events if event.get("kind") in ("opened", "training")]
    trained = [str(event.get("run")) for event in events if event.get("kind") == "training"]
    for name in (*made[-1:], *trained[-1:]):
        folder = os.path.normpath(os.path.join(attempt.run_folder, name))
        own, story = part_of(folder, attempt.run_folder, events, about, step, phase, is_over)
        of_last = (FINISHED, UNSAVED) if is_over else (FINISHED, UNSAVED, LEFT)
        if (story is None or (own.is_last and story in of_last)) and os.path.isdir(folder):
            return folder
    return str(attempt.run_folder)


def trained_last(attempt: Attempt) -> str | None:
    """The folder of the run that trained last in this attempt; the recording's own of a loop without a run; or None."""
    told = [event for event in read_events(attempt.folder) if event.get("kind") in ("training", "loop")]
    if told and told[-1].get("kind") == "training":
        folder = os.path.normpath(os.path.join(attempt.run_folder, str(told[-1].get("run"))))
        return folder if os.path.isdir(folder) else None
    _, beacon = _main_process(attempt)
    has_stepped = bool(told) or (beacon is not None and bool(beacon.step))
    return str(attempt.run_folder) if has_stepped else None


def _main_process(attempt: Attempt) -> tuple[dict[str, Any], Reading | None]:
    """attempt.json, and the beacon of the process that it speaks of."""
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    return about, read_beacon(os.path.join(attempt.folder, f"process-{about.get('pid')}", "beacon"))


def _names_one(run: str | None) -> bool:
    """Whether these words name a run, or one attempt of it: not a folder that runs lie in."""
    if run is None:
        return False
    start = os.path.abspath(run if os.path.isdir(run) else os.path.join("runs", run))
    run_folder, attempts, _ = start.rpartition(os.sep + "attempts")
    return is_run(start) or bool(attempts and is_run(run_folder))


def _took_part(attempt: Attempt, folder: str) -> bool:
    own = training_of(read_events(attempt.folder), attempt.run_folder, folder)
    return own.opened or own.began


MOST_LOOKS = 8
"""Attempts that are looked at, newest first."""
_NO_NEWS = ("clean-exit", "still-running", FINISHED, LEFT, NOT_BEGUN)


def beside(verdict: Verdict, asked: Asked) -> Verdict:
    """The verdict on the last attempt, with a word about another that may be meant.

    Where the last one runs well and the one before it died, that death is what is asked for.
    """
    run = asked.attempt.run_folder if asked.of_process else asked.run
    others = [asked._replace(attempt=other) for other in attempts_of(run) if other != asked.attempt]
    if verdict.cause.id == "still-running":
        return _before(verdict, others) or verdict
    if verdict.cause.id == NOT_BEGUN and others:
        return _last_trained(verdict, others)
    if verdict.beside is not None:
        return verdict
    if (lost := lost_recording(run)) is not None:
        return replace(
            verdict,
            beside=f"a later recording of this run is not here ({from_here(lost)}): this is about one before it",
        )
    return replace(
        verdict,
        beside=_lived_beside(verdict, asked.attempt, [other.attempt for other in others[-MOST_LOOKS:]], run),
    )


def _before(running: Verdict, others: list[Asked]) -> Verdict | None:
    """The death of the attempt before, if it died."""
    verdict = verdict_on(others[-1]) if others else None
    if verdict is None or verdict.cause.id in _NO_NEWS:
        return None
    return replace(
        verdict, beside=f"attempt {running.attempt} is running now; this is about the one before it"
    )


def _last_trained(idle: Verdict, others: list[Asked]) -> Verdict:
    """The end of the last attempt that did a step of this run: one that only opened it again ended nothing."""
    for other in reversed(others[-MOST_LOOKS:]):
        verdict = verdict_on(other)
        if verdict.cause.id != NOT_BEGUN:
            return replace(verdict, beside=opened_again(idle.attempt))
    return idle


def opened_again(attempt: int) -> str:
    """Of a later attempt that ended nothing."""
    return f"attempt {attempt} opened it again and did no step of it"


def _lived_beside(verdict: Verdict, found: Attempt, others: list[Attempt], run: str) -> str | None:
    """A line about another attempt that ended during or after this one and did not end well."""
    mine = _life(found)
    if mine is None:
        return None
    for other in reversed(others):
        theirs = _life(other)
        record = read_json(os.path.join(other.folder, "verdict.json")) or {}
        cause = text(mapping(record.get("cause")).get("id"))
        if theirs is None or cause is None or theirs[0] != mine[0]:
            continue  # of another boot: neither clocks nor pids can be compared
        (_, began, ended), (_, other_began, other_ended) = mine, theirs
        if other_ended <= began or other_began >= ended:
            continue
        if other_ended > ended or (cause != "clean-exit" and verdict.cause.id == "clean-exit"):
            name = shlex.quote(printable(run, 60))
            ask = f"`buoy why {name} --attempt {other.number}`"
            return f"attempt {other.number} ran at the same time and ended with {cause}: {ask}"
    return None


def _life(attempt: Attempt) -> tuple[str, float, float] | None:
    """The boot it lived in, its beginning and its end there; None where one of them was not recorded."""
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    death = read_json(os.path.join(attempt.folder, "death.json")) or {}
    boot, began, ended = text(about.get("boot_id")), number(about.get("t")), number(death.get("t"))
    if boot is None or began is None or ended is None:
        return None
    return boot, began, ended
