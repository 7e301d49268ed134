"""Where a run is recorded: in its own folder, or by the recorder that runs already, as a notebook's does."""

from __future__ import annotations

import os
from collections.abc import Callable

from buoy.checkpoint.store import Store
from buoy.flight import recorder
from buoy.flight.attempt import Attempt, point_to
from buoy.flight.mirror import ask_for_copies
from buoy.flight.recorder import Recorder
from buoy.supervisor.refused import REFUSED
from buoy.supervisor.watch import watch
from buoy.text import printable
from buoy.training.foothold import make_folder


def record(store: Store, mirror: str | None, limit: float | None, say: Callable[[str], None]) -> Recorder:
    """Record this process for the run whose checkpoints are in this store; its log goes to the mirror too."""
    folder = store.folder
    make_folder(folder)
    there = recorder.current()
    if there is not None:  # a recording whose folder is gone, or that could not begin, is begun anew
        is_new = there.attempt is None
        there = watch(folder if is_new else None, mirror=mirror if is_new else None, time_limit=limit)
    attempt = there.attempt if there is not None else recorder.attempt_of_environment()
    newest = next((entry.folder for entry in store.list() if entry.complete), None)
    if attempt is None and there is not None:
        there.opened(folder, newest)
        return there
    if attempt is None:
        own = watch(folder, mirror=mirror, time_limit=limit)
        own.opened(folder, newest)
        return own
    joined = watch()
    joined.opened(folder, newest)
    if os.path.realpath(attempt.run_folder) != os.path.realpath(folder):
        recorded = printable(attempt.run_folder)
        say(f"checkpoints go to {printable(folder)}, the recording to {recorded}")
        if limit is not None:
            joined.event("time-limit", seconds=limit)
        _point(folder, attempt)
    if mirror is not None:
        _copy_too(attempt, mirror, folder, say)
    return joined


def refused(folder: str) -> None:
    """Another process trains this run: let `buoy run` know that this attempt is none."""
    there = recorder.current()
    if there is not None:
        there.event(REFUSED, run=folder)


def _point(folder: str, attempt: Attempt) -> None:
    try:
        point_to(folder, attempt)
    except OSError:
        pass  # a folder that cannot be written is told of when the first checkpoint is made


def _copy_too(attempt: Attempt, mirror: str, folder: str, say: Callable[[str], None]) -> None:
    try:
        ask_for_copies(attempt.folder, mirror, folder)
    except OSError as error:
        say(f"the recording is not copied to the mirror: {error.strerror}; the checkpoints are")
