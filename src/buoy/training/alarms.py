"""What the sidecar foresees, heard by the training: memory or disk that will run out is a reason to save."""

from __future__ import annotations

import json
import os
from math import inf

from buoy.checkpoint.schedule import Cost
from buoy.flight.attempt import Attempt
from buoy.flight.recorder import Recorder
from buoy.machine.files import read_bounded

_EXHAUSTION = {"ram", "ram-level", "vram", "disk", "shm"}
_DEADLY = _EXHAUSTION - {"disk", "ram-level"}
"""What ends the process when it is full, at a forecast time; on a disk that fills, more checkpoints are no help."""
_MOST_BYTES = 256 << 10
_PAUSE = 60.0
"""A leak is told again and again; one checkpoint a minute is enough for being told."""
_LEAST_AFTER = 60.0
"""Seconds after the foretold end in which it may still come; at least as long again as it was foretold before."""
_LEAST_PAUSE, _UNKNOWN_PAUSE = 2.0, 10.0


def pause(cost: Cost | None) -> float:
    """Seconds between two checkpoints before a foretold end: saving may take a tenth of the time, for a short while.

    >>> pause(Cost(stall=0.01, slowdown=0.0, write=0.2)), pause(Cost(0.5, 0.5, 4.0)), pause(None)
    (2.0, 12.0, 10.0)
    """
    return max(_LEAST_PAUSE, 10 * cost.seconds, 3 * cost.write) if cost is not None else _UNKNOWN_PAUSE


class Alarms:
    """Reads on in the attempt's events, a few bytes every few seconds."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attempt: Attempt | None = None
        self._offset = 0
        self._told = -_PAUSE
        self._end = self._over = -inf
        """When something that ends the process will be full, and when that is no longer to be expected."""

    def due(self, now: float, saved: float | None, cost: Cost | None) -> bool:
        """Whether to save for what was foretold, having last saved at `saved`.

        When it is told, and again whenever the time that is left has halved: the nearer the end, the less is lost. The
        measured cost sets the shortest pause. After the foretold end the pauses grow again, and then it is over.
        """
        told = [found for line in self._new_lines() if (found := _exhaustion(line)) is not None]
        for alarm, seconds in told:
            if alarm in _DEADLY and seconds is not None:
                self._end, self._over = now + seconds, now + seconds + max(_LEAST_AFTER, seconds)
        if told and now - self._told >= _PAUSE:
            self._told = now
            return True
        if now >= self._over or saved is None:
            return False
        return now - saved >= max(abs(self._end - now), pause(cost))

    def _new_lines(self) -> list[bytes]:
        attempt = self._recorder.attempt
        if attempt != self._attempt:  # the recording was begun anew
            self._attempt, self._offset = attempt, 0
        if attempt is None:
            return []
        try:
            data = read_bounded(os.path.join(attempt.folder, "events.jsonl"), _MOST_BYTES, at=self._offset)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole) or (len(data) if len(data) == _MOST_BYTES else 0)
        return whole.splitlines()


def _exhaustion(line: bytes) -> tuple[str, float | None] | None:
    """What this line of the events says will be full, and in how many seconds; None where it says no such thing."""
    if b'"warning"' not in line:
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("kind") != "warning" or event.get("alarm") not in _EXHAUSTION:
        return None
    values = event.get("values")
    seconds = values.get("seconds") if isinstance(values, dict) else None
    return event["alarm"], float(seconds) if isinstance(seconds, int | float) else None
