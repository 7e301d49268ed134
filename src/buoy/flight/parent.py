"""The process that started the training: a kernel ends itself once the server above it is gone."""

from __future__ import annotations

import os

from buoy.flight.privacy import mask_text
from buoy.machine import procfs


class Parent:
    """The parent as it was when the recording began; its end is learnt through its pidfd.

    Reparenting is no sign by itself: it tells nothing of when, and a subreaper may take init's place.
    """

    def __init__(self, pid: int) -> None:
        self._child = pid
        self.pid = _parent_of(pid)
        self.pidfd = -1
        self._name = procfs.process_name(self.pid) if self.pid else ""
        self._is_awaited = self.pid is not None and _awaits(pid, self.pid)
        if not self.pid:
            return  # outside of our PID namespace, or gone already
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.pid = None
            return
        if _parent_of(pid) != self.pid:  # it ended in between: the number may be somebody else's
            self.close()

    def describe(self, status: int | None, source: str | None) -> dict[str, object]:
        """What its end is worth to a verdict, for the event `parent-death`."""
        return {
            "pid": self.pid,
            "name": mask_text(self._name),
            "status": status,
            "source": source,
            "awaited": self._is_awaited,
        }

    def close(self) -> None:
        """Let go of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd, self.pid = -1, None


def _parent_of(pid: int) -> int | None:
    found = procfs.parse_stat(procfs.read_bytes(f"/proc/{pid}/stat"))
    return found.ppid if found is not None and found.ppid > 1 else None


def _awaits(pid: int, parent: int) -> bool:
    """Whether Jupyter told this process to end with that parent; what it starts inherits the word, not the parent."""
    mark = b"JPY_PARENT_PID=%d" % parent
    return mark in procfs.read_bytes(f"/proc/{pid}/environ", 1 << 20).split(b"\0")
