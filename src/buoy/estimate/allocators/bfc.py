"""TensorFlow's BFC allocator on a GPU: best fit with coalescing, modelled from its source.

By default TensorFlow takes its whole share of the device at the start, so with a capacity there is one region of that
size. Without one, regions grow as they do with `set_memory_growth(True)`: each at least twice the last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from buoy.estimate.allocators import OutOfMemory, Replay
from buoy.estimate.trace import Event, most_live

ROUND = 256
FIRST_REGION = 2 << 20
# A chunk is kept whole unless that would waste half of it, or this much.
MOST_WASTE = 128 << 20


class _Chunk:
    __slots__ = ("address", "free", "next", "previous", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.free = True
        self.previous: _Chunk | None = None
        self.next: _Chunk | None = None


class _State:
    def __init__(self, capacity: int | None, growth: bool) -> None:
        self.capacity = capacity
        self.free: list[tuple[int, int, _Chunk]] = []
        self.chunks: dict[int, _Chunk] = {}
        self.allocated = self.reserved = 0
        self.region = FIRST_REGION
        self.address = 0
        self.growth = growth or capacity is None
        if not self.growth and capacity is not None:
            self._add_region(capacity // ROUND * ROUND)

    def malloc(self, identity: int, request: int) -> bool:
        size = rounded(request)
        index = bisect_left(self.free, (size, -1))
        if index == len(self.free):
            if not self.growth or not self._extend(size):
                return False
            index = bisect_left(self.free, (size, -1))
        chunk = self.free.pop(index)[2]
        rest = chunk.size - size
        if chunk.size >= 2 * size or rest >= MOST_WASTE:
            after = _Chunk(chunk.address + size, rest)
            after.previous, after.next = chunk, chunk.next
            if chunk.next is not None:
                chunk.next.previous = after
            chunk.next, chunk.size = after, size
            insort(self.free, (after.size, after.address, after))
        chunk.free = False
        self.chunks[identity] = chunk
        self.allocated += chunk.size
        return True

    def free_chunk(self, identity: int) -> None:
        chunk = self.chunks.pop(identity, None)
        if chunk is None:
            return
        self.allocated -= chunk.size
        before, after = chunk.previous, chunk.next
        if after is not None and after.free:
            self._take(after)
            chunk.size += after.size
            chunk.next = after.next
            if after.next is not None:
                after.next.previous = chunk
        if before is not None and before.free:
            self._take(before)
            before.size += chunk.size
            before.next = chunk.next
            if chunk.next is not None:
                chunk.next.previous = before
            chunk = before
        chunk.free = True
        insort(self.free, (chunk.size, chunk.address, chunk))

    def _extend(self, size: int) -> bool:
        left = None if self.capacity is None else (self.capacity - self.reserved) // ROUND * ROUND
        if left is not None and left < size:
            return False
        grew = False
        while self.region < size:
            self.region *= 2
            grew = True
        self._add_region(self.region if left is None else min(self.region, left))
        if not grew:
            self.region *= 2
        return True

    def _add_region(self, size: int) -> None:
        self.reserved += size
        chunk = _Chunk(self.address, size)
        self.address += size + ROUND  # regions never merge
        insort(self.free, (size, chunk.address, chunk))

    def _take(self, chunk: _Chunk) -> None:
        self.free.pop(bisect_left(self.free, (chunk.size, chunk.address)))


def rounded(size: int) -> int:
    """The least chunk that serves a request.

    >>> rounded(1)
    256
    """
    return -(-size // ROUND) * ROUND


def replay(events: Sequence[Event], capacity: int | None = None, *, growth: bool = False) -> Replay:
    """Replay a trace. `peak_allocated` is `bytes_in_use` at its highest.

    >>> replay([("a", 1, 1000)], capacity=1 << 20).peak_allocated
    1024
    """
    state = _State(capacity, growth)
    failure = None
    peak = peak_event = 0
    for index, (kind, identity, size) in enumerate(events):
        if kind == "f":
            state.free_chunk(identity)
        elif kind == "a" and size:
            if not state.malloc(identity, size):
                failure = OutOfMemory(index, size, rounded(size), state.allocated, state.reserved)
                break
            if state.allocated > peak:
                peak, peak_event = state.allocated, index
    return Replay(peak, state.reserved, state.allocated, peak_event, 0, failure)


def floor(events: Sequence[Event]) -> int:
    """The most rounded bytes live at once."""
    return most_live(events, rounded)
