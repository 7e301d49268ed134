"""The session's RAM as a training sees it: what is left of its budget, the peak of some work, a cap on the process."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from buoy.errors import UsageError
from buoy.machine import cgroup, host
from buoy.machine.files import PAGE
from buoy.machine.procfs import FileReader, to_int
from buoy.units import format_bytes, parse_bytes

_RESERVE = 0.04  # of the limit: what the kernel and other processes need at the same time
_RESERVE_LEAST, _RESERVE_MOST = 64 << 20, 0.12
"""In a small session the share is too little: fragments of the heap and our own writer do not shrink with it."""
_PATIENCE = 0.1  # seconds for which a reading of the host is good
_USABLE = 0.9  # of the room; the rest goes into the gaps of the heap
_MARGIN, _MARGIN_LEAST = 0.01, 8 << 20
"""Of the limit: how near to it an allocation is refused. Pages of the kernel's own count too."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = 256 << 10
_LARGEST = 32 << 20
"""What the C library itself raises its threshold to, as blocks are freed."""


class HostMemory:
    """The session's RAM: the memory group's limit, else the machine's, less a reserve; or a cap set by us."""

    def __init__(self) -> None:
        self._group = cgroup.find(os.getpid())
        self._machine = host.MemoryReader()
        self._status = FileReader("/proc/self/status")
        self._statm = FileReader("/proc/self/statm")
        self._total = host.memory().total
        self._read_at = 0.0
        self._free: int | None = None
        self._libc = _find_glibc()
        self._maps_large_blocks = False
        self.data_limit: int | None = None
        """RLIMIT_DATA, where `memory_cap` set one."""

    def free(self) -> int | None:
        """Bytes until the budget, by a reading that is at most a few hundredths of a second old."""
        now = time.monotonic()
        if now - self._read_at > _PATIENCE:
            self._free, self._read_at = self.free_now(), now
        return self._free

    def free_now(self) -> int | None:
        """The same, read now."""
        rooms = [self._group_room(_reserve), self._machine_room(_reserve), self._cap_room()]
        known = [room for room in rooms if room is not None]
        return max(0, int(min(known) * _USABLE)) if known else None

    def used(self) -> int | None:
        """Resident bytes of this process."""
        words = self._statm.read(256).split()
        pages = to_int(words[1]) if len(words) > 1 else None
        return None if pages is None else pages * PAGE

    def mark(self) -> None:
        """Begin a new high-water mark of resident memory."""
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass  # the mark is then as old as the process, and `highest` an upper bound

    def highest(self) -> int | None:
        """The high-water mark."""
        return self._status_bytes(b"VmHWM:")

    def give_back(self) -> None:
        """Return to the kernel what was freed and is kept for the next request: it reads as used otherwise.

        From the first time on, large blocks are mapped and unmapped one by one. That costs some time, but no gaps
        are left between them, which a small session has no room for.
        """
        if not self._maps_large_blocks:
            self._map_blocks_from(_LARGE)
            self._maps_large_blocks = True
        self.trim()

    def trim(self) -> None:
        """Return to the kernel what was freed, this once."""
        if self._libc is not None:
            self._libc.malloc_trim(0)
        self._read_at = 0.0

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Where the kernel would kill this process without a word, an allocation raises: as under `memory_cap`.

        The limit is one on what is mapped, not on what is used. So blocks are mapped one by one in the meantime: what
        is found in gaps of the heap, which were given back to the kernel, would not be counted.
        """
        self._map_blocks_from(_LARGE)
        self.trim()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            self._limit(before)
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
            if not self._maps_large_blocks:
                self._map_blocks_from(_LARGEST)

    def _limit(self, before: tuple[int, int]) -> None:
        left, data = self.left(), self.data_bytes()
        if left is None or data is None:
            return
        limits = [each for each in before if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([data + left, *limits]), before[1]))

    def left(self) -> int | None:
        """Bytes until the kernel would kill: nearer to its limit than `free`, for what is refused and not planned."""
        rooms = [self._group_room(_margin), self._machine_room(_margin)]
        known = [room for room in rooms if room is not None]
        return max(0, min(known)) if known else None

    def _map_blocks_from(self, size: int) -> None:
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, size)
            self._libc.mallopt(_M_TRIM_THRESHOLD, size)

    def _group_room(self, reserve: Callable[[int], int]) -> int | None:
        if self._group is None:
            return None
        limit, used = self._group.limit(), self._group.used()
        return None if limit is None or used is None else limit - reserve(limit) - used

    def _machine_room(self, reserve: Callable[[int], int]) -> int | None:
        available = self._machine.available()
        return None if available is None else available - reserve(self._total or 0)

    def _cap_room(self) -> int | None:
        if self.data_limit is None:
            return None
        data = self.data_bytes()
        return None if data is None else self.data_limit - data

    def data_bytes(self) -> int | None:
        """What RLIMIT_DATA counts: private writable memory, touched or not."""
        return self._status_bytes(b"VmData:")

    def _status_bytes(self, name: bytes) -> int | None:
        _, found, rest = self._status.read(8192).partition(b"\n" + name)
        words = rest.split(None, 1)
        kib = to_int(words[0]) if found and words else None
        return None if kib is None else kib * 1024


def _reserve(limit: int) -> int:
    return int(max(limit * _RESERVE, min(_RESERVE_LEAST, limit * _RESERVE_MOST)))


def _margin(limit: int) -> int:
    return int(max(limit * _MARGIN, _MARGIN_LEAST))


def _find_glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


_host: tuple[int, HostMemory] | None = None


def host_memory() -> HostMemory:
    """This process's one reader of the host's memory."""
    global _host
    if _host is None or _host[0] != os.getpid():  # a forked child has a memory of its own
        _host = (os.getpid(), HostMemory())
    return _host[1]


def set_cap(cap: str | int, say: Callable[[str], object], *, gpu: bool) -> None:
    """Let this process have so many bytes in all; more raises MemoryError, or the framework's words for it.

    The kernel counts private writable memory, touched or not, so the limit is set by what is resident now.
    """
    size = parse_bytes(cap) if isinstance(cap, str) else cap
    if gpu:
        raise UsageError("memory_cap is for processes without a GPU", received=format_bytes(size),
                         expected="no CUDA device", hint="leave it out: the driver maps more than it uses")  # fmt: skip
    memory = host_memory()
    resident, data = memory.used(), memory.data_bytes()
    if resident is None or data is None:
        say("memory_cap has no effect here: /proc does not say how much memory this process uses")
        return
    if size <= resident:
        raise UsageError("memory_cap is less than this process already holds", received=format_bytes(size),
                         expected=f"more than {format_bytes(resident)}")  # fmt: skip
    limit = data + size - resident
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    memory.data_limit = limit
