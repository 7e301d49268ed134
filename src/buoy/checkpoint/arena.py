"""The arena: memory for one copy of the state, shared with the writer process, made once and used again."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from buoy.checkpoint.layout import PAGE
from buoy.machine import cgroup, host

_ROOM = 1.3  # the arena, and as much again of a third for what a step allocates
_SLICE = 4 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Arena:
    """Shared memory without a name: it lives as long as the trainer or the writer has it open."""

    def __init__(self, size: int) -> None:
        self.size = max(PAGE, -(-size // PAGE) * PAGE)
        self.descriptor = os.memfd_create("buoy-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.size)
            self._map = mmap.mmap(self.descriptor, self.size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.memory = memoryview(self._map)

    def touch(self) -> None:
        """Fetch the pages ahead of the first copy, in a thread that only waits in the kernel."""
        threading.Thread(target=self._touch, daemon=True, name="buoy-arena").start()

    def close(self) -> None:
        """Let go; memory still looked at by somebody goes with that view."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.memory = memoryview(b"")

    def _touch(self) -> None:
        # In slices, so that the training's own mappings wait no longer than for one; through ctypes,
        # since mmap.madvise keeps the interpreter to itself.
        held = self._map
        try:
            madvise = ctypes.CDLL(None).madvise
            start = ctypes.addressof(ctypes.c_char.from_buffer(held))
            for at in range(0, self.size, _SLICE):
                size = min(_SLICE, self.size - at)
                if madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(size), _POPULATE_WRITE):
                    return  # an older kernel: the first copy fetches them
        except (AttributeError, OSError, ValueError):
            return


def has_room(size: int) -> bool:
    """Whether memory for one more copy of the state can be had with something to spare."""
    room = memory_room()
    return room is None or room >= _ROOM * size


def memory_room() -> int | None:
    """Bytes that can still be had: of the machine, and of the control group, which counts shared memory too."""
    rooms = [host.memory().available]
    group = cgroup.find(os.getpid())
    if group is not None:
        limit, used = group.limit(), group.used()
        group.close()
        if limit is not None and used is not None:
            rooms.append(max(0, limit - used))
    return min((room for room in rooms if room is not None), default=None)
