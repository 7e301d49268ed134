"""Looks after the recorder of a watched process: when the sidecar is gone, another is started.

`buoy run` does this from outside. Here there is only the training itself, so its own steps and the notebook's cells
look, every few seconds; no thread of ours runs in it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from buoy.flight.attempt import Attempt
from buoy.flight.recorder import Recorder
from buoy.machine import procfs
from buoy.supervisor.start import start_sidecar

LOOK_SECONDS = 2.0
MOST_RESTARTS = 3


class Upkeep:
    """Starts the sidecar again, three times at most."""

    def __init__(
        self, recorder: Recorder, attempt: Attempt, sidecar: int, say: Callable[[str], None]
    ) -> None:
        self._recorder = recorder
        self._attempt = attempt
        self._sidecar = sidecar
        self._born = _born(sidecar)
        self._say = say
        self._restarts = 0
        self._given_up = False
        self._pid = os.getpid()
        self._next = time.monotonic() + LOOK_SECONDS
        self._step: Callable[[int | None], None] = recorder.beacon.step

    def begin(self) -> None:
        """Look from now on, at steps and at the start of cells."""
        self._recorder.beacon.step = self._stepped  # type: ignore[method-assign]
        ipython: Any = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None:
            shell.events.register("pre_run_cell", lambda info: self._look())

    def _stepped(self, number: int | None = None) -> None:
        self._step(number)
        if time.monotonic() >= self._next:
            self._look()

    def _look(self) -> None:
        self._next = time.monotonic() + LOOK_SECONDS
        if os.getpid() != self._pid or self._given_up:
            return
        if self._born is not None and _born(self._sidecar) == self._born:
            return
        try:
            self._start_again()
        except Exception as error:  # noqa: BLE001 - a guard that fails must not end the training
            self._say(f"the recorder is gone and cannot be started again: {error!r}; the training goes on")

    def _start_again(self) -> None:
        self._given_up = True  # until another has started
        if self._restarts >= MOST_RESTARTS:
            self._say("the recorder died again and stays down: nothing is recorded, the training goes on")
            return
        self._restarts += 1
        sidecar = start_sidecar(self._attempt, self._pid)
        if sidecar is None:
            self._say(
                "the recorder is gone and did not start again: nothing is recorded, the training goes on"
            )
            return
        self._sidecar, self._born, self._given_up = sidecar, _born(sidecar), False
        self._recorder.event("sidecar", what="restarted", times=self._restarts)
        self._say("the recorder had died and was started again; what happened in between is not recorded")


def _born(pid: int) -> int | None:
    """When this process began, by which it is known from a later one of the same number; None when it is gone."""
    stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{pid}/stat"))
    return stat.start_ticks if stat is not None and stat.state not in ("Z", "X") else None
