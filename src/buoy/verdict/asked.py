"""Which run a question is about: the one that is named, else the one that the process was at."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from buoy.errors import RunFolderError
from buoy.flight.attempt import Attempt, find_attempt, find_run, is_kernel, is_run
from buoy.flight.beacon import read_beacon
from buoy.flight.log import read_events
from buoy.flight.trainings import Training, training_of
from buoy.machine.records import read_json
from buoy.verdict.going_on import FINISHED, LEFT, UNSAVED
from buoy.verdict.own_story import IDLE, what_became


class Asked(NamedTuple):
    """An attempt, and whose part in it is asked for."""

    attempt: Attempt
    run: str
    """The run's folder; the recording's own where no run of it can be told."""
    of_process: bool
    """Whether the end of the process is meant, whatever became of this run's training before that."""


def asked_for(run: str | None = None, number: int | None = None) -> Asked:
    """What a person means by a run (None, or a folder of runs: the newest) and an attempt (None: the last)."""
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

    That is the run that was made or trained last, unless that one had been left before the end. Steps that were counted
    after the end of the last training are those of a loop without a run: then it is the recording's own folder.
    """
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    events = read_events(attempt.folder)
    beacon = read_beacon(os.path.join(attempt.folder, f"process-{about.get('pid')}", "beacon"))
    count = beacon.step if beacon is not None else None
    was_idle = beacon is not None and beacon.phase == IDLE
    is_over = any(os.path.exists(os.path.join(attempt.folder, name)) for name in ("death.json", "exit.json"))
    named = [str(event.get("run")) for event in events if event.get("kind") in ("opened", "training")]
    trained = [str(event.get("run")) for event in events if event.get("kind") == "training"]
    for name in (*named[-1:], *trained[-1:]):
        folder = os.path.normpath(os.path.join(attempt.run_folder, name))
        own = training_of(events, attempt.run_folder, folder)
        if not own.began and own.may_have_stepped(count):
            own = Training()
        story = what_became(own, True, is_kernel(about.get("command")), was_idle, is_over)
        of_last = (FINISHED, UNSAVED) if is_over else (FINISHED, UNSAVED, LEFT)
        is_it = story is None or (own.is_last and story in of_last)
        if is_it and not _is_left_behind(own, count) and os.path.isdir(folder):
            return folder
    return str(attempt.run_folder)


def trained_last(attempt: Attempt) -> str | None:
    """The folder of the run that trained last in this attempt; the recording's own of a loop without a run; or None."""
    told = [event for event in read_events(attempt.folder) if event.get("kind") in ("training", "loop")]
    if told and told[-1].get("kind") == "training":
        folder = os.path.normpath(os.path.join(attempt.run_folder, str(told[-1].get("run"))))
        return folder if os.path.isdir(folder) else None
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    beacon = read_beacon(os.path.join(attempt.folder, f"process-{about.get('pid')}", "beacon"))
    has_stepped = bool(told) or (beacon is not None and bool(beacon.step))
    return str(attempt.run_folder) if has_stepped else None


def _is_left_behind(own: Training, count: int | None) -> bool:
    stands = own.step if own.ended is not None else None
    return own.is_last and None not in (count, stands) and count != stands


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
