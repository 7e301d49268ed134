"""Which writer processes have a run's lock, and whether they do anything: for words, and to stop waiting for them."""

from __future__ import annotations

import os

from buoy.machine.procfs import field, parse_stat, read_bytes

LOCK = "lock"
"""The file in `checkpoints/`."""

_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for the disk"}


def writers_of(checkpoints: str) -> list[int]:
    """The numbers of the writer processes that hold this run's lock; empty where that cannot be seen."""
    try:
        lock = os.stat(os.path.join(checkpoints, LOCK))
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    found = []
    for name in names:
        if b"writer.py" in read_bytes(f"/proc/{name}/cmdline", 4096) and _has_open(name, lock):
            found.append(int(name))
    return sorted(found)


def in_words(pids: list[int]) -> str:
    """`process 1234, stopped`; nothing where none was seen."""
    return "; ".join(f"process {pid}" + (f", {state}" if (state := _state(pid)) else "") for pid in pids)


def work_done(pids: list[int]) -> object:
    """A value that changes while any of them does something: processor time and bytes handed to the disk."""
    marks: list[object] = []
    for pid in pids:
        stat = parse_stat(read_bytes(f"/proc/{pid}/stat"))
        written = field(read_bytes(f"/proc/{pid}/io"), b"wchar:")
        marks.append((pid, stat.cpu_seconds if stat is not None else None, written))
    return tuple(marks)


def _state(pid: int) -> str | None:
    stat = parse_stat(read_bytes(f"/proc/{pid}/stat"))
    return _STATES.get(stat.state) if stat is not None else None


def _has_open(name: str, file: os.stat_result) -> bool:
    try:
        for descriptor in os.listdir(f"/proc/{name}/fd"):
            there = os.stat(f"/proc/{name}/fd/{descriptor}")
            if (there.st_dev, there.st_ino) == (file.st_dev, file.st_ino):
                return True
    except OSError:
        pass  # it is gone, or another user's
    return False
