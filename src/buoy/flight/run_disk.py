"""The disk that a run's files go to: the recording's own, until a run is opened on another one."""

from __future__ import annotations

import os

from buoy.machine import disk
from buoy.machine.files import read_bounded
from buoy.machine.records import parse_json

_COUNTED_PERIOD = 60.0
"""Where a quota makes us count files instead of asking the file system."""
_MOST_BYTES = 256 << 10


class RunDisk:
    """Read on by the sidecar; which disk it is, the training says in its events (`disk`)."""

    def __init__(self, attempt_folder: str, run_folder: str) -> None:
        self.path = run_folder
        self._events = os.path.join(attempt_folder, "events.jsonl")
        self._offset = 0
        self._due = 0.0
        self._known: disk.Space | None = None

    def space(self, now: float) -> disk.Space | None:
        """Room there; None when it cannot be asked."""
        path = self._named_last()
        if path is not None and path != self.path:
            self.path, self._due = path, 0.0
        if now >= self._due:
            self._known = disk.space(self.path)
            is_asked = self._known is not None and self._known.source == "statvfs"
            self._due = now + (0.0 if is_asked else _COUNTED_PERIOD)
        return self._known

    def _named_last(self) -> str | None:
        try:
            if os.stat(self._events).st_size <= self._offset:
                return None
            data = read_bounded(self._events, _MOST_BYTES, at=self._offset)
        except OSError:
            return None
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole) or (len(data) if len(data) == _MOST_BYTES else 0)
        paths = [_path(line) for line in whole.splitlines() if b'"disk"' in line]
        return next((path for path in reversed(paths) if path is not None), None)


def _path(line: bytes) -> str | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    path = event.get("path") if isinstance(event, dict) and event.get("kind") == "disk" else None
    return path if isinstance(path, str) else None


def on_another_disk(folder: str, device: int | None) -> int | None:
    """The device of a folder on a local disk that is not `device`; None of one on the same disk, or on a mounted drive.

    What a mounted drive says of its room is not what may be put there, and asking it may take forever.
    """
    try:
        found = os.stat(folder).st_dev
    except OSError:
        return None
    return found if found != device and disk.is_remote(folder) is False else None
