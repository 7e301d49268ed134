"""PyTorch's CUDACachingAllocator with `expandable_segments:True`, one stream: modelled from its source.

Each pool (small up to 1 MiB, large above) is one long range of addresses into which pages are mapped as needed: 2 MiB
pages for the small pool, 20 MiB for the large one. No recorded trace of the real allocator in this mode exists here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from buoy.estimate.allocators import OutOfMemory, Replay
from buoy.estimate.allocators.native import LARGE_SEGMENT, MIN_BLOCK, SMALL, SMALL_SEGMENT, floor, rounded
from buoy.estimate.trace import Event

__all__ = ["floor", "replay"]

# Longer than any device is large: the range itself costs nothing.
RANGE = 1 << 44


class _Block:
    __slots__ = ("address", "free", "mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int, *, mapped: bool) -> None:
        self.address = address
        self.size = size
        self.mapped = mapped
        self.free = True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def can_grow_to(self) -> int:
        """Its size, with the unmapped range that follows."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)


class _Pool:
    """One expandable segment: a chain of blocks, mapped or not, over one range of addresses."""

    def __init__(self, page: int) -> None:
        self.page = page
        first = _Block(0, RANGE, mapped=False)
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = [(0, first)]

    def best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self.free, (size, -1))
        if index == len(self.free):
            return None
        # A block that could still grow counts as large as it may become, so that smaller holes are used first.
        while (
            index + 1 < len(self.free)
            and self.free[index + 1][2].can_grow_to() < self.free[index][2].can_grow_to()
        ):
            index += 1
        return self.free.pop(index)[2]

    def growable(self, size: int) -> _Block:
        """The lowest place where `size` bytes can be had by mapping, with a free block right before it."""
        for _, block in self.unmapped:
            start = (
                block.previous
                if block.previous is not None and block.previous.free and block.previous.mapped
                else block
            )
            found = 0
            here: _Block | None = start
            while found < size and here is not None and here.free:
                found += here.size
                here = here.next
            if found >= size:
                return start
        raise AssertionError("the range of addresses has no end in practice")

    def map(self, block: _Block, size: int) -> _Block:
        """Map the pages under the first `size` bytes of an unmapped block; returns the free block they belong to."""
        self.unmapped.remove((block.address, block))
        pages = -(-size // self.page) * self.page
        if pages < block.size:
            rest = _Block(block.address + pages, block.size - pages, mapped=False)
            _link(block, rest)
            insort(self.unmapped, (rest.address, rest), key=lambda entry: entry[0])
            block.size = pages
        block.mapped = True
        return self.release(block)

    def release(self, block: _Block) -> _Block:
        """Put a mapped block among the free ones, merged with its free neighbours."""
        before, after = block.previous, block.next
        if before is not None and before.free and before.mapped:
            self.take(before)
            before.size += block.size
            _unlink(block)
            block = before
        if after is not None and after.free and after.mapped:
            self.take(after)
            block.size += after.size
            _unlink(after)
        block.free = True
        insort(self.free, (block.size, block.address, block))
        return block

    def take(self, block: _Block) -> None:
        self.free.pop(bisect_left(self.free, (block.size, block.address)))

    def split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, mapped=True)
        block.size = size
        _link(block, rest)
        insort(self.free, (rest.size, rest.address, rest))

    def unmap_free_pages(self) -> int:
        """Give every whole free page back to the device; returns the bytes."""
        given = 0
        for _, _, block in list(self.free):
            first = -(-block.address // self.page) * self.page
            last = (block.address + block.size) // self.page * self.page
            if first >= last:
                continue
            self.take(block)
            head, tail = first - block.address, block.address + block.size - last
            if head:
                before = _Block(block.address, head, mapped=True)
                block.address, block.size = first, block.size - head
                _link_before(block, before)
                insort(self.free, (before.size, before.address, before))
            if tail:
                block.size -= tail
                rest = _Block(last, tail, mapped=True)
                _link(block, rest)
                insort(self.free, (rest.size, rest.address, rest))
            given += block.size
            self._unmapped(block)
        return given

    def _unmapped(self, block: _Block) -> None:
        block.mapped = False
        before, after = block.previous, block.next
        if before is not None and not before.mapped:
            self.unmapped.remove((before.address, before))
            before.size += block.size
            _unlink(block)
            block = before
        if after is not None and not after.mapped:
            self.unmapped.remove((after.address, after))
            block.size += after.size
            _unlink(after)
        insort(self.unmapped, (block.address, block), key=lambda entry: entry[0])


class _State:
    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.pools = {True: _Pool(SMALL_SEGMENT), False: _Pool(LARGE_SEGMENT)}
        self.blocks: dict[int, tuple[_Pool, _Block]] = {}
        self.allocated = self.reserved = self.peak_reserved = self.retries = 0

    def malloc(self, identity: int, request: int) -> bool:
        size = rounded(request)
        pool = self.pools[size <= SMALL]
        block = pool.best_fit(size) or self._grow(pool, size)
        if block is None:
            self.retries += 1
            self.reserved -= sum(each.unmap_free_pages() for each in self.pools.values())
            block = self._grow(pool, size)
            if block is None:
                return False
        block.free = False
        if block.size - size >= MIN_BLOCK:
            pool.split(block, size)
        self.blocks[identity] = (pool, block)
        self.allocated += block.size
        return True

    def free_block(self, identity: int) -> None:
        found = self.blocks.pop(identity, None)
        if found is not None:
            pool, block = found
            self.allocated -= block.size
            pool.release(block)

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        block = pool.growable(size)
        if not block.mapped:
            grown = self._map(pool, block, min(block.size, size))
            if grown is None:
                return None
            block = grown
        while block.size < size:
            assert block.next is not None, "a free block that can grow has an unmapped one behind it"
            grown = self._map(pool, block.next, min(block.next.size, size - block.size))
            if grown is None:
                return None
            block = grown
        pool.take(block)
        return block

    def _map(self, pool: _Pool, block: _Block, size: int) -> _Block | None:
        pages = -(-size // pool.page) * pool.page
        if self.capacity is not None and self.reserved + pages > self.capacity:
            return None
        self.reserved += pages
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return pool.map(block, size)


def replay(events: Sequence[Event], capacity: int | None = None) -> Replay:
    """Replay a trace; reserved is what is mapped.

    >>> replay([("a", 1, 3 << 20), ("a", 2, 30 << 20)]).peak_reserved == 40 << 20
    True
    """
    state = _State(capacity)
    failure = None
    peak = peak_event = 0
    for index, (kind, identity, size) in enumerate(events):
        if kind == "f":
            state.free_block(identity)
        elif kind == "a" and size:
            if not state.malloc(identity, size):
                failure = OutOfMemory(index, size, rounded(size), state.allocated, state.reserved)
                break
            if state.allocated > peak:
                peak, peak_event = state.allocated, index
    return Replay(peak, state.peak_reserved, state.allocated, peak_event, state.retries, failure)


def _link(block: _Block, after: _Block) -> None:
    after.previous, after.next = block, block.next
    if block.next is not None:
        block.next.previous = after
    block.next = after


def _link_before(block: _Block, before: _Block) -> None:
    before.previous, before.next = block.previous, block
    if block.previous is not None:
        block.previous.next = before
    block.previous = before


def _unlink(block: _Block) -> None:
    if block.previous is not None:
        block.previous.next = block.next
    if block.next is not None:
        block.next.previous = block.previous
