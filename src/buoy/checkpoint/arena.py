"""The arena: memory for one copy of the state, shared with the writer process, made once and used again.

The copy that a training waits for: by the C library, in as many threads as there are cores to spare, two at most.

torch's own copy begins and ends a group of threads for each tensor. With the cores busy, as they are beside the workers
of a loader, each of them waits for a core: measured three times as long as this one, and a third longer in quiet.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress

from buoy.checkpoint.manifest import PAGE
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


_CHUNK = 8 << 20
_WORTH_A_THREAD = 32 << 20  # bytes

Job = tuple[memoryview, int]
"""Where to, and the address of as many bytes."""


def copy_all(jobs: list[Job]) -> None:
    """Copy each; whoever owns what is copied keeps it until this returns.

    >>> source, room = ctypes.create_string_buffer(b"weights"), bytearray(7)
    >>> copy_all([(memoryview(room), ctypes.addressof(source))])
    >>> room
    bytearray(b'weights')
    """
    # ctypes.memmove would hold the interpreter's lock.
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    chunks = _chunks(jobs)
    todo = iter(chunks)  # a list's iterator: the threads take turns at it

    def work() -> None:
        for to, source, size in todo:
            memcpy(to, source, size)

    helper = None
    if sum(size for _, _, size in chunks) >= _WORTH_A_THREAD and (os.cpu_count() or 1) > 1:
        helper = threading.Thread(target=work, name="buoy-copy", daemon=True)
    try:
        if helper is not None:
            with suppress(RuntimeError):  # no thread is to be had: this one does it all
                helper.start()
        work()
    finally:
        if helper is not None:
            _wait_for(helper, todo)


def _wait_for(helper: threading.Thread, todo: Iterator[object]) -> None:
    """However often Ctrl-C is pressed, or another signal raises: it writes where the next checkpoint will be."""
    raised: BaseException | None = None
    is_done = False
    while not is_done:
        try:
            for _ in todo:
                pass  # it is to stop too
            if helper.is_alive():
                helper.join()
            is_done = True
        except BaseException as error:  # noqa: BLE001 - whatever a signal's handler raises
            raised = error
    if raised is not None:
        raise raised


def _chunks(jobs: list[Job]) -> list[tuple[int, int, int]]:
    return [chunk for room, source in jobs for chunk in _cut(room, source)]


def _cut(room: memoryview, source: int) -> Iterator[tuple[int, int, int]]:
    to = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for start in range(0, room.nbytes, _CHUNK):
        yield to + start, source + start, min(_CHUNK, room.nbytes - start)
