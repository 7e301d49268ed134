"""A Python below `buoy run` whose recording was moved or removed: it goes over to the one that `buoy run` begins anew.

Its own steps look, every few seconds. Loaded by the bootstrap into every Python, so it imports next to nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from buoy.flight.attempt import Attempt, attempt_numbers
from buoy.flight.recorder import ATTEMPT_VARIABLE, Recorder
from buoy.machine.records import read_json

LOOK_SECONDS = 1.0


class Following:
    """Looks at each step, and moves the recorder where the folder is gone and another recording has begun."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attempt = recorder.attempt
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._next = self._began + LOOK_SECONDS
        self._step: Callable[[int | None], None] = recorder.beacon.step
        recorder.beacon.step = self._stepped  # type: ignore[method-assign]

    def _stepped(self, number: int | None = None) -> None:
        self._step(number)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_SECONDS
            try:
                self._look()
            except Exception:  # noqa: BLE001 - it trains on, recorded from outside
                pass

    def _look(self) -> None:
        attempt = self._attempt
        if attempt is None or os.getpid() != self._pid:
            return
        if self._recorder.attempt is not None:
            if not is_gone(os.path.join(attempt.folder, f"process-{self._pid}")):
                return
            self._recorder.move(None)
        new = self._begun_anew(attempt.run_folder)
        if new is not None:
            self._recorder.move(new)
            self._attempt = new
            os.environ[ATTEMPT_VARIABLE] = new.folder  # for what this process starts from here on

    def _begun_anew(self, run_folder: str) -> Attempt | None:
        """The recording that began after this process did, if there is one."""
        for number in attempt_numbers(run_folder)[-1:]:
            folder = os.path.join(run_folder, "attempts", f"{number:04d}")
            about = read_json(os.path.join(folder, "attempt.json")) or {}
            began = about.get("t")
            if about.get("mode") == "run" and isinstance(began, float) and began > self._began:
                return Attempt(run_folder, folder, number)
        return None


def is_gone(folder: str) -> bool:
    """Whether there is no such folder; a drive that does not answer may answer again."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
