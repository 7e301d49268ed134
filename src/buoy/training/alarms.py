"""What the sidecar foresees, heard by the training: memory or disk that will run out is a reason to save."""

from __future__ import annotations

import json
import os

from buoy.flight.attempt import Attempt
from buoy.flight.recorder import Recorder

_EXHAUSTION = {"ram", "vram", "disk", "shm"}
_MOST_BYTES = 256 << 10
_PAUSE = 60.0
"""A leak is told again and again; one checkpoint a minute is enough."""


class Alarms:
    """Reads on in the attempt's events, a few bytes every few seconds."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attempt: Attempt | None = None
        self._offset = 0
        self._told = -_PAUSE

    def heard(self, now: float) -> bool:
        """Whether an exhaustion was foretold since the last call that said so, a minute ago or more."""
        if not any(self._is_exhaustion(line) for line in self._new_lines()) or now - self._told < _PAUSE:
            return False
        self._told = now
        return True

    def _new_lines(self) -> list[bytes]:
        attempt = self._recorder.attempt
        if attempt != self._attempt:  # the recording was begun anew
            self._attempt, self._offset = attempt, 0
        if attempt is None:
            return []
        try:
            with open(os.path.join(attempt.folder, "events.jsonl"), "rb") as file:
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
