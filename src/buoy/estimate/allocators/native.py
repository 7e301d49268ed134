"""PyTorch's CUDACachingAllocator, native backend, one stream, default settings: bit for bit.

Requests are rounded to 512 B; up to 1 MiB they live in 2 MiB segments, up to 10 MiB in 20 MiB segments, above that in
segments of their own rounded to 2 MiB. Best fit by (size, address), split when worth it, merge on free; when the
device refuses, every wholly free segment is given back and the request is tried once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from buoy.estimate.allocators import OutOfMemory, Replay
from buoy.estimate.trace import Event, most_live

MIB = 1 << 20
MIN_BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_FROM = 10 * MIB
SEGMENT_ROUND = 2 * MIB


class _Block:
    __slots__ = ("address", "free", "next", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None


def rounded(size: int) -> int:
    """The block a request occupies, before any unsplit rest.

    >>> rounded(1), rounded(513)
    (512, 1024)
    """
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """What is asked of the device for a block of this size when no cached one serves."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


class _State:
    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        # Free blocks of each pool as (size, address, block), sorted: best fit is the first at or above a size.
        self.free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self.blocks: dict[int, _Block] = {}
        self.allocated = 0
        self.reserved = self.peak_reserved = 0
        self.next_address = 0
        self.retries = 0

    def malloc(self, identity: int, request: int) -> bool:
        size = rounded(request)
        small = size <= SMALL
        pool = self.free[small]
        index = bisect_left(pool, (size, -1))
        if index < len(pool):
            block = pool.pop(index)[2]
            block.free = False
        else:
            segment = self._new_segment(size, small)
            if segment is None:
                return False
            block = segment
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            self._split(block, size, rest)
        self.blocks[identity] = block
        self.allocated += block.size
        return True

    def free_block(self, identity: int) -> None:
        block = self.blocks.pop(identity, None)
        if block is None:  # zero bytes were asked for
            return
        self.allocated -= block.size
        before, after = block.previous, block.next
        if before is not None and before.free:
            self._take(before)
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        self._put(block)

    def _new_segment(self, size: int, small: bool) -> _Block | None:
        wanted = segment_size(size)
        if self.capacity is not None and self.reserved + wanted > self.capacity:
            self.retries += 1
            self._give_back_free_segments()
            if self.reserved + wanted > self.capacity:
                return None
        block = _Block(self.next_address, wanted, small)
        # Segments never touch, so that blocks never merge across them.
        self.next_address += wanted + SEGMENT_ROUND
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: _Block, size: int, rest: int) -> None:
        remainder = _Block(block.address + size, rest, block.small)
        remainder.previous, remainder.next = block, block.next
        if block.next is not None:
            block.next.previous = remainder
        block.next = remainder
        block.size = size
        self._put(remainder)

    def _give_back_free_segments(self) -> None:
        for small, pool in self.free.items():
            whole = [entry[2] for entry in pool if entry[2].previous is None and entry[2].next is None]
            self.reserved -= sum(block.size for block in whole)
            gone = {id(block) for block in whole}
            self.free[small] = [entry for entry in pool if id(entry[2]) not in gone]

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(self.free[block.small], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        pool = self.free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.address)))
        block.free = False


def replay(events: Sequence[Event], capacity: int | None = None) -> Replay:
    """Replay a trace.

    >>> replay([("a", 1, 3 << 20), ("f", 1, 0)]).peak_reserved == 20 << 20
    True
    >>> replay([("a", 1, 3 << 20)], capacity=10 << 20).fits
    False
    """
    state = _State(capacity)
    failure = None
    peak = peak_event = 0
    for index, (kind, identity, size) in enumerate(events):
        if kind == "f":
            state.free_block(identity)
        elif kind == "a" and size:
            if not state.malloc(identity, size):
                failure = OutOfMemory(
                    index, size, segment_size(rounded(size)), state.allocated, state.reserved
                )
                break
            if state.allocated > peak:
                peak, peak_event = state.allocated, index
    return Replay(peak, state.peak_reserved, state.allocated, peak_event, state.retries, failure)


def floor(events: Sequence[Event]) -> int:
    """The most rounded bytes live at once: no capacity below can serve them."""
    return most_live(events, rounded)
