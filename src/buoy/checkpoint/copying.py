"""The copy that a training waits for: by the C library, in as many threads as there are cores to spare, two at most.

torch's own copy begins and ends a group of threads for each tensor. With the cores busy, as they are beside the workers
of a loader, each of them waits for a core: measured three times as long as this one, and a third longer in quiet.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import suppress

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
