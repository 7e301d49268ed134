"""The flight log's tail in a home that only fsspec reaches; into folders the recorder copies it itself."""

from __future__ import annotations

import os
import time

from buoy.checkpoint.home_url import UrlHome
from buoy.checkpoint.homes import Home
from buoy.flight.mirror import PERIOD, copy_tail, number_there

_LOOK_SECONDS = 0.25
_VERDICT_SECONDS = 10.0


class LogTail:
    """Copies the log of one attempt; whoever calls it has looked whose the home is."""

    def __init__(self, run: str, attempt: str | None) -> None:
        self._run = run
        self._attempt = attempt
        self._due = 0.0
        self._number: int | None = None

    def is_due(self, home: Home) -> bool:
        """Whether it is time for the next copy."""
        return self._belongs(home) and time.monotonic() >= self._due

    def is_complete(self, home: Home) -> bool:
        """Wait for the verdict, for which the recorder needs a moment; whether there is a log to copy."""
        until = time.monotonic() + (_VERDICT_SECONDS if self._belongs(home) else 0.0)
        verdict = os.path.join(self._attempt or "", "verdict.json")
        while time.monotonic() < until and not os.path.exists(verdict):
            time.sleep(_LOOK_SECONDS)
        return self._belongs(home)

    def copy(self, home: Home) -> None:
        """Copy it, under a number that no other machine's log has there."""
        assert self._attempt is not None
        self._due = time.monotonic() + PERIOD
        if self._number is None:
            self._number = number_there(self._attempt, home.read_beside)
        copy_tail(self._attempt, os.path.join(self._run, "run.json"), self._number, home.write_beside)

    def _belongs(self, home: Home) -> bool:
        return self._attempt is not None and isinstance(home, UrlHome)
