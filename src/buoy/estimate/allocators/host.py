"""Host memory: what glibc's malloc keeps of the pages it took.

Small requests live on the heap, which shrinks only from its top; large ones are mapped alone and returned at once.
What counts as large moves: freeing a mapped block of up to 32 MiB raises the threshold to its size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from buoy.estimate.allocators import OutOfMemory, Replay
from buoy.estimate.trace import Event, most_live

PAGE = 4096
HEADER = 16
ALIGN = 64  # both frameworks ask for aligned memory
FIRST_THRESHOLD = 128 << 10
LAST_THRESHOLD = 32 << 20


class _Heap:
    """Free ranges of the heap by (size, address), and by both ends so that neighbours merge."""

    def __init__(self) -> None:
        self.top = 0
        self.high = 0
        self.free: list[tuple[int, int]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}

    def take(self, size: int) -> int:
        index = bisect_left(self.free, (size, -1))
        if index == len(self.free):
            address, self.top = self.top, self.top + size
            self.high = max(self.high, -(-self.top // PAGE) * PAGE)
            return address
        found, address = self.free[index]
        self._forget(found, address)
        if found > size:
            self._remember(found - size, address + size)
        return address

    def give(self, size: int, address: int, trim: int) -> None:
        if address in self.ends:
            start = self.ends[address]
            size += address - start
            self._forget(address - start, start)
            address = start
        if address + size in self.starts:
            more = self.starts[address + size]
            self._forget(more, address + size)
            size += more
        if address + size == self.top:
            self.top = address
            if self.high - self.top >= trim:
                self.high = -(-self.top // PAGE) * PAGE
        else:
            self._remember(size, address)

    def _remember(self, size: int, address: int) -> None:
        insort(self.free, (size, address))
        self.starts[address] = size
        self.ends[address + size] = address

    def _forget(self, size: int, address: int) -> None:
        self.free.pop(bisect_left(self.free, (size, address)))
        del self.starts[address]
        del self.ends[address + size]


def replay(events: Sequence[Event], capacity: int | None = None) -> Replay:
    """Replay a trace. `peak_allocated` counts the bytes asked for, `peak_reserved` the pages behind them.

    >>> found = replay([("a", 1, 1 << 20), ("f", 1, 0)])
    >>> found.peak_allocated, found.peak_reserved
    (1048576, 1052672)
    """
    heap = _Heap()
    mapped: dict[int, int] = {}
    on_heap: dict[int, tuple[int, int]] = {}
    asked: dict[int, int] = {}
    threshold = FIRST_THRESHOLD
    allocated = pages = peak = reserved = peak_event = 0
    failure = None
    for index, (kind, identity, size) in enumerate(events):
        if kind == "f":
            allocated -= asked.pop(identity, 0)
            if identity in mapped:
                freed = mapped.pop(identity)
                pages -= freed
                if threshold < freed <= LAST_THRESHOLD:
                    threshold = freed
            elif identity in on_heap:
                heap.give(*on_heap.pop(identity), trim=2 * threshold)
        elif kind == "a" and size:
            whole = size + ALIGN + HEADER
            if whole >= threshold:
                mapped[identity] = -(-whole // PAGE) * PAGE
                pages += mapped[identity]
            else:
                on_heap[identity] = (-(-whole // HEADER) * HEADER, heap.take(-(-whole // HEADER) * HEADER))
            asked[identity] = size
            allocated += size
            reserved = max(reserved, pages + heap.high)
            if capacity is not None and pages + heap.high > capacity:
                failure = OutOfMemory(index, size, whole, allocated - size, pages + heap.high)
                break
            if allocated > peak:
                peak, peak_event = allocated, index
    return Replay(peak, reserved, allocated, peak_event, 0, failure)


def floor(events: Sequence[Event]) -> int:
    """The most bytes asked for at once."""
    return most_live(events, int)
