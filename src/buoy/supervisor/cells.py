"""Marks the notebook cell that runs on the beacon, and the time between two cells as no work at all."""

from __future__ import annotations

import os
import sys
from typing import Any

from buoy.flight import recorder
from buoy.flight.beacon import Beacon
from buoy.flight.privacy import mask_code
from buoy.machine.files import append

_MOST = 120
_MOST_CELLS = 10_000
CELLS = "cells"
"""The file in a process's folder that tells which cell is which of the files that stacks name: a line each."""


def mark_cells(beacon: Beacon) -> None:
    """Follow this process's notebook cells, if it is a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
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
    if there is None or there.attempt is None or not code or number > _MOST_CELLS:
        return
    try:
        name = os.path.basename(shell.compile.get_code_name(code, code, number))
        folder = os.path.join(there.attempt.folder, f"process-{os.getpid()}")
        if not name.startswith("<") and name.isprintable():  # else the number is in the name
            append(os.path.join(folder, CELLS), f"{number} {name}\n")
    except Exception:  # noqa: BLE001 - another kernel's ways, a full disk: it is a cell without a number then
        pass


def _first_line(code: str | None) -> str:
    lines = (line.strip() for line in (code or "").splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    # Cut before it is masked, since a cell waits for it; and far enough behind that no half of a secret is left.
    return mask_code(first[: _MOST + 500])[:_MOST]
