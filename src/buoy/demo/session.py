"""A session made small for real: a memory cgroup, as Colab and Kaggle confine one, or else a limit on the process."""

from __future__ import annotations

import os
from pathlib import Path

_PLACES = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


class Session:
    """So many MiB for whatever enters. `is_real`: the kernel's own limit, not a stand-in."""

    def __init__(self, mib: int) -> None:
        self.mib = mib
        self._group = _make_group(mib)
        self.is_real = self._group is not None

    def enter(self) -> None:
        """Confine the calling process and what it starts."""
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (self.mib << 20, self.mib << 20))

    def close(self) -> None:
        """Give it back; what has just ended in it may need a moment to leave."""
        import time

        for _ in range(50):
            try:
                if self._group is not None:
                    self._group.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def _make_group(mib: int) -> Path | None:
    for parent, limit in _PLACES:
        group = Path(parent) / f"buoy-demo-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(mib << 20))
            return group
        except OSError:
            group.rmdir()
    return None
