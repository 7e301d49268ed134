"""What the sidecar foresees, heard by the training: memory or disk that will run out is a reason to save."""

from __future__ import annotations

import json
import os

from buoy.flight.attempt import Attempt

_EXHAUSTION = {"ram", "vram", "disk", "shm"}
_MOST_BYTES = 256 << 10
_PAUSE = 60.0
"""A leak is told again and again; one checkpoint a minute is enough."""


class Alarms:
    """Reads on in the attempt's events, a few bytes every few seconds."""

    def __init__(self, attempt: Attempt | None) -> None:
        self._path = os.path.join(attempt.folder, "events.jsonl") if attempt is not None else None
        self._offset = 0
        self._told = -_PAUSE

    def heard(self, now: float) -> bool:
        """Whether an exhaustion was foretold since the last call that said so, a minute ago or more."""
        if not any(self._is_exhaustion(line) for line in self._new_lines()) or now - self._told < _PAUSE:
            return False
        self._told = now
        return True

    def _new_lines(self) -> list[bytes]:
        if self._path is None:
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole) or (len(data) if len(data) == _MOST_BYTES else 0)
        return whole.splitlines()

    @staticmethod
    def _is_exhaustion(line: bytes) -> bool:
        if b'"warning"' not in line:
            return False
        try:
            event = json.loads(line)
        except ValueError:
            return False
        return (
            isinstance(event, dict) and event.get("kind") == "warning" and event.get("alarm") in _EXHAUSTION
        )
