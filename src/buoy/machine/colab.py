"""What Colab knows about its own sessions: a second memory cgroup for kernels, and a file of kills.

Read in a copy of its oom_monitor.sh, not tried live: the files named in CGROUP_MEMORY_EVENTS (blanks between)
are polled each second; a change of their summed `oom_kill` appends `epoch,2,oom_kill=N` to /var/colab/events.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

EVENTS = "/var/colab/events"
_KERNELS = "/var/colab/cgroup/jupyter-children/memory.events"
_MOST_BYTES = 65536
_MOST_LINES = 200


def memory_events_paths(environ: Mapping[str, str], root: str = "/") -> list[str]:
    """The `memory.events` files of a Colab session that exist, below `root`; empty elsewhere."""
    named = environ.get("CGROUP_MEMORY_EVENTS", "").split() or [_KERNELS]
    paths = [root.rstrip("/") + name for name in named if name.startswith("/") and ".." not in name]
    return [path for path in paths if path.endswith("/memory.events") and os.path.exists(path)]


class ColabEvents:
    """Lines that Colab adds to its event file from now on."""

    def __init__(self, root: str = "/") -> None:
        self._path = root.rstrip("/") + EVENTS
        try:
            self._offset = os.stat(self._path).st_size
        except (OSError, ValueError):
            self._offset = 0  # the file appears with the first event

    @property
    def readable(self) -> bool:
        """Whether this machine has such a file, or the folder in which Colab would make it."""
        return os.access(self._path, os.R_OK) or os.access(os.path.dirname(self._path), os.R_OK)

    def read_new(self) -> list[str]:
        """Whole lines since the last call, without control bytes."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return []
        try:
            if os.fstat(fd).st_size < self._offset:  # started over
                self._offset = 0
            data = os.pread(fd, _MOST_BYTES, self._offset)
        except OSError:
            return []
        finally:
            os.close(fd)
        end = data.rfind(b"\n") + 1
        self._offset += end if end or len(data) < _MOST_BYTES else len(data)
        lines = data[:end].decode("ascii", "replace").split("\n")
        shown = ["".join(char if char.isprintable() else " " for char in line)[:200] for line in lines]
        return [line for line in shown if line.strip()][:_MOST_LINES]
