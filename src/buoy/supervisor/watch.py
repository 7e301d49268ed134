"""`buoy.watch()`: the flight recorder for a notebook or a script that nobody launched with `buoy run`."""

from __future__ import annotations

import os
import sys

from buoy.errors import RecorderError
from buoy.flight import recorder
from buoy.flight.attempt import Attempt, new_attempt
from buoy.flight.recorder import Recorder
from buoy.supervisor.cells import mark_cells
from buoy.supervisor.start import default_run_folder, describe_attempt, start_sidecar, write_attempt


def watch(
    folder: str | None = None, *, mirror: str | None = None, time_limit: str | float | None = None
) -> Recorder:
    """Record this process: what it uses, where it is, and after its death why it died (`buoy why`).

    The folder defaults to `runs/<script>`. Under `buoy run`, or when called again, the recording that is
    there already is joined. A sidecar that cannot start is told on stderr, and the training goes on.

    >>> import buoy
    >>> watch = buoy.watch("runs/cats", time_limit="12h")   # doctest: +SKIP
    >>> with watch.phase("eval"):                            # doctest: +SKIP
    ...     evaluate(model)
    """
    there = recorder.current()
    attempt = there.attempt if there is not None else recorder.attempt_of_environment()
    if attempt is not None:
        if folder is not None and os.path.realpath(folder) != os.path.realpath(attempt.run_folder):
            raise RecorderError(
                "this process is being recorded already, into another folder",
                received=folder,
                expected=str(attempt.run_folder),
                hint="leave the folder out to join that recording, or give it to `buoy run --run DIR`",
            )
        return _join(attempt)
    command = [sys.executable, *(sys.argv if sys.argv and sys.argv[0] else [])]
    attempt = new_attempt(folder or default_run_folder(command))
    started = _join(attempt)
    os.environ[recorder.WATCHED_VARIABLE] = attempt.folder
    write_attempt(describe_attempt(attempt, "watch", os.getpid(), command, mirror, time_limit), attempt)
    if not start_sidecar(attempt, os.getpid()):
        sys.stderr.write("buoy: the recorder's sidecar did not start; training goes on without samples\n")
    return started


def _join(attempt: Attempt) -> Recorder:
    known = recorder.current()
    joined = recorder.join(attempt)
    if known is None:
        mark_cells(joined.beacon)
    return joined
