"""`buoy.watch()`: the flight recorder for a notebook or a script that nobody launched with `buoy run`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from buoy.errors import RunFolderError, notebook_shell, this_system, trouble
from buoy.flight import recorder
from buoy.flight.attempt import Attempt, discard, new_attempt
from buoy.flight.beacon import Beacon
from buoy.flight.privacy import mask_code
from buoy.flight.recorder import Recorder
from buoy.machine.files import append
from buoy.machine.process import is_rehearsal
from buoy.supervisor.start import default_run_folder, describe_attempt, log_home, write_attempt
from buoy.supervisor.upkeep import Upkeep, say
from buoy.units import parse_time_limit

_upkeep: Upkeep | None = None


def watch(
    folder: str | None = None, *, mirror: str | None = None, time_limit: str | float | None = None
) -> Recorder:
    """Record this process: what it uses, where it is, and after its death why it died (`buoy why`).

    The folder defaults to `runs/<script>`. Under `buoy run`, or when called again, the recording that is
    there already is joined, whatever folder is asked for. What cannot be recorded is said in a line on
    stderr, and training continues.

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
            say(
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
    seconds, home = parse_time_limit(time_limit), log_home(mirror, f"mirror={mirror!r}")
    if attempt is not None:
        is_here = folder is None or os.path.realpath(folder) == os.path.realpath(attempt.run_folder)
        if folder is not None and not is_here and not was_nowhere:
            from buoy.text import printable

            say(f"already recording into {printable(attempt.run_folder)}; {printable(folder)} is not used")
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
            discard(attempt)
            raise OSError(error.errno, error.strerror, attempt.run_folder) from error
        os.environ[recorder.WATCHED_VARIABLE] = attempt.folder
        return attempt

    trouble = None
    try:
        joined = _begin_in(begun())
    except (RunFolderError, OSError) as error:
        trouble = f"nothing is recorded; training continues: {error}"
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
        discard(attempt)
        raise


def _join(attempt: Attempt | None) -> Recorder:
    known = recorder.current()
    joined = recorder.join(attempt)
    if known is None:
        mark_cells(joined.beacon)
    return joined


# Cells of a notebook: which one runs is on the beacon, and the time between two is no work at all.

_LINE_MOST = 120
_CELLS_MOST = 10_000
CELLS = "cells"
"""The file in a process's folder that tells which cell is which of the files that stacks name: a line each."""


def mark_cells(beacon: Beacon) -> None:
    """Follow this process's notebook cells, if it is a notebook."""
    shell = notebook_shell()
    if shell is None:
        return

    def number(running: bool) -> int:
        # `execution_count` is one too high from IPython 8 on; the list of inputs grows once a cell has begun to run.
        return len(shell.user_ns.get("In") or ()) - running

    beacon.cell(f"In [{number(running=True)}]")

    def begins(info: Any) -> None:
        beacon.cell(f"In [{number(running=False)}] {_first_line(info.raw_cell)}")
        beacon.phase("start")  # a plan, a plot, a download: whether this cell trains shows at its first step
        _name_file(shell, info.raw_cell, number(running=False))

    def ends(result: Any) -> None:
        beacon.cell("")
        beacon.phase("done")
        there = recorder.current()
        if there is not None:
            from buoy.flight.last_words import describe

            error = getattr(result, "error_in_exec", None)
            # The kernel lives on, so that nothing else would say what left a training.
            there.cell_ended(describe(error) if error is not None else None)

    shell.events.register("pre_run_cell", begins)
    shell.events.register("post_run_cell", ends)


def _name_file(shell: Any, code: str | None, number: int) -> None:
    """Note the file that a kernel calls this cell by: what is defined in one cell may be what dies in another."""
    there = recorder.current()
    if there is None or there.attempt is None or not code or number > _CELLS_MOST:
        return
    try:
        name = os.path.basename(shell.compile.get_code_name(code, code, number))
        folder = os.path.join(there.attempt.folder, f"process-{os.getpid()}")
        if not name.startswith("<") and name.isprintable():  # else the number is in the name
            append(os.path.join(folder, CELLS), f"{number} {name}\n")
    except OSError:
        pass  # a full disk: it is a cell without a number then
    except Exception as error:  # noqa: BLE001 - as then; a kernel of another kind
        trouble("the numbers of cells", error)


def _first_line(code: str | None) -> str:
    lines = (line.strip() for line in (code or "").splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    # Cut before it is masked, since a cell waits for it; and far enough behind that no half of a secret is left.
    return mask_code(first[: _LINE_MOST + 500])[:_LINE_MOST]
