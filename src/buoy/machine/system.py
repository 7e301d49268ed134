"""What this operating system can do with files, and what is done without where it cannot.

Recording and saving need Linux; who looks at a run on a Mac or on Windows comes by here too. Windows has no O_CLOEXEC
(what is opened is not inherited there), no folders that can be opened, no pread, and changes line ends unless told.
The sidecar imports this file: it imports next to nothing.
"""

from __future__ import annotations

import os
from _thread import allocate_lock

NOT_INHERITED = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
IS_FOLDER = getattr(os, "O_DIRECTORY", 0)
"""0 where folders cannot be opened."""
READ = os.O_RDONLY | NOT_INHERITED

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""Clock ticks in a second, as /proc counts."""
PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096

_seeking = allocate_lock()  # several threads may read one file, which has one position


def _seek_and_read(descriptor: int, size: int, at: int) -> bytes:
    with _seeking:
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.read(descriptor, size)


read_at = os.pread if hasattr(os, "pread") else _seek_and_read
"""Bytes from a place in an open file."""


def read_into(descriptor: int, room: memoryview, at: int) -> int:
    """Fill the room from this place on; how many bytes there were."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [room], at)
    data = read_at(descriptor, len(room), at)
    room[: len(data)] = data
    return len(data)


def read_ahead(descriptor: int, at: int, size: int) -> None:
    """Let the disk begin to fetch what is read next, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)
