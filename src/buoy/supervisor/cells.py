"""Marks the notebook cell that runs on the beacon, and the time between two cells as no work at all."""

from __future__ import annotations

import sys
from typing import Any

from buoy.flight import recorder
from buoy.flight.beacon import Beacon
from buoy.flight.last_words import describe
from buoy.flight.privacy import mask_code

_MOST = 120


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
    before = ["start"]

    def begins(info: Any) -> None:
        beacon.cell(f"In [{number(running=False)}] {_first_line(info.raw_cell)}")
        beacon.phase(before[0])

    def ends(result: Any) -> None:
        beacon.cell("")
        before[0] = beacon.phase("done")
        there = recorder.current()
        if there is not None:
            error = getattr(result, "error_in_exec", None)
            # The kernel lives on, so that nothing else would say what left a training.
            there.cell_ended(describe(error) if error is not None else None)

    shell.events.register("pre_run_cell", begins)
    shell.events.register("post_run_cell", ends)


def _first_line(code: str | None) -> str:
    lines = [
        line.strip()
        for line in (code or "").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return mask_code(lines[0])[:_MOST] if lines else ""
