"""The flight log's tail in a home that only fsspec reaches; into folders the recorder copies it itself."""

from __future__ import annotations

import json
import os
import time
from tempfile import TemporaryDirectory

from buoy.checkpoint.home_url import UrlHome
from buoy.checkpoint.homes import Home
from buoy.flight.attempt import read_json
from buoy.flight.mirror import PERIOD, copy_tail, identity_of

_ATTEMPT = "attempt.json"
_MOST_BYTES = 1 << 20
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
            self._number = _number_there(home, self._attempt)
        with TemporaryDirectory(prefix="buoy-") as tail:
            to = os.path.join(tail, "attempts", f"{self._number:04d}")
            copy_tail(self._attempt, os.path.join(self._run, "run.json"), tail, to)
            for folder, _, names in os.walk(tail):
                for name in names:
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        home.write_beside(os.path.relpath(path, tail), file.read())

    def _belongs(self, home: Home) -> bool:
        return self._attempt is not None and isinstance(home, UrlHome)


def _number_there(home: Home, attempt: str) -> int:
    """The attempt's own, unless a lost machine's log has that one there: then the next that is free."""
    mine = identity_of(read_json(os.path.join(attempt, _ATTEMPT)))
    number = int(os.path.basename(attempt))
    while (there := home.read_beside(f"attempts/{number:04d}/{_ATTEMPT}", _MOST_BYTES)) is not None:
        if mine is not None and identity_of(_parsed(there)) == mine:
            break
        number += 1
    return number


def _parsed(data: bytes) -> dict[str, object] | None:
    try:
        about = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) else None
