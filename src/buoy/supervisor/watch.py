"""`buoy.watch()`: the flight recorder for a notebook or a script that nobody launched with `buoy run`."""

from __future__ import annotations

import os
import sys
import time

from buoy.errors import RunFolderError, this_system
from buoy.flight import recorder
from buoy.flight.attempt import Attempt, new_attempt
from buoy.flight.recorder import Recorder
from buoy.planner.rehearsal import is_rehearsal
from buoy.supervisor.cells import mark_cells
from buoy.supervisor.start import (
    default_run_folder,
    describe_attempt,
    limit_seconds,
    log_home,
    write_attempt,
)
from buoy.supervisor.upkeep import Upkeep, forget
from buoy.text import visible

_upkeep: Upkeep | None = None


def watch(
    folder: str | None = None, *, mirror: str | None = None, time_limit: str | float | None = None
) -> Recorder:
    """Record this process: what it uses, where it is, and after its death why it died (`buoy why`).

    The folder defaults to `runs/<script>`. Under `buoy run`, or when called again, the recording that is
    there already is joined, whatever folder is asked for. What cannot be recorded is told in a line on
    stderr, and the training goes on.

    >>> import buoy
    >>> watch = buoy.watch("runs/cats", time_limit="12h")
    >>> watch.step()
    >>> with watch.phase("eval"):
    ...     pass  # a long evaluation is no hang
    """
    if is_rehearsal():
        return _join(None)
    if sys.platform != "linux":
        if recorder.current() is None:  # once
            _say(
                f"recording needs Linux, and this is {this_system()}: nothing is recorded, the training continues"
            )
        return _join(None)
    there = recorder.current()
    was_nowhere = there is not None and there.attempt is None
    if there is not None and _upkeep is not None:
        _upkeep.look(now=True)
        if there.attempt is None and folder is not None:  # what is usual cannot be written: this one may be
            _upkeep.look(os.path.expanduser(folder))
    attempt = there.attempt if there is not None else recorder.attempt_of_environment()
    seconds, home = limit_seconds(time_limit), log_home(mirror, f"mirror={mirror!r}")
    if attempt is not None:
        is_here = folder is None or os.path.realpath(folder) == os.path.realpath(attempt.run_folder)
        if folder is not None and not is_here and not was_nowhere:
            from buoy.text import printable

            _say(f"already recording into {printable(attempt.run_folder)}; {printable(folder)} is not used")
        return _join(attempt)
    return _begin(folder, home, seconds) if there is None or _upkeep is None else there


def _begin(folder: str | None, mirror: str | None, seconds: float | None) -> Recorder:
    global _upkeep
    command = [sys.executable, *(sys.argv if sys.argv and sys.argv[0] else [])]
    chosen = os.path.expanduser(folder) if folder is not None else default_run_folder(command)
    began = time.time()
    usual = os.path.abspath(chosen)  # the working directory may be another one by the time it is needed again

    def begun(asked: str | None = None) -> Attempt:
        attempt = new_attempt(asked or usual)
        try:
            about = describe_attempt(attempt, "watch", os.getpid(), command, mirror, seconds)
            known = about["session_started"]
            about["session_started"] = min(began, known) if isinstance(known, float) else began
            write_attempt(about, attempt)
        except OSError as error:
            forget(attempt)
            raise OSError(error.errno, error.strerror, attempt.run_folder) from error
        os.environ[recorder.WATCHED_VARIABLE] = attempt.folder
        return attempt

    trouble = None
    try:
        joined = _begin_in(begun())
    except (RunFolderError, OSError) as error:
        trouble = f"nothing is recorded, the training goes on: {error}"
        joined = _join(None)
    _upkeep = Upkeep(joined, begun)
    _upkeep.begin(trouble)
    return joined


def _begin_in(attempt: Attempt) -> Recorder:
    try:
        joined = _join(attempt)
        if joined.attempt is None:  # it was there before, with nowhere to write to
            joined.move(attempt)
        return joined
    except OSError:
        forget(attempt)
        raise


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"buoy: {visible(text)}\n")
    except (OSError, AttributeError):
        pass  # stderr is closed


def _join(attempt: Attempt | None) -> Recorder:
    known = recorder.current()
    joined = recorder.join(attempt)
    if known is None:
        mark_cells(joined.beacon)
    return joined
