"""Models of the allocators that stand between a training and its memory: pure replays of a trace's events.

`native` and `expandable` are PyTorch's on CUDA, `bfc` is TensorFlow's on a GPU, `host` is malloc. With a capacity,
"fits" is the allocator's own answer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buoy.estimate.trace import Event, most_live

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Replay:
    """What an allocator model says about a trace."""

    peak_allocated: int
    """Most bytes in blocks handed out (`torch.cuda.max_memory_allocated`); on the host the bytes asked for."""
    peak_reserved: int
    """Most bytes taken from the device (`torch.cuda.max_memory_reserved`); on the host the pages behind them."""
    end_allocated: int
    peak_event: int
    """Index of the event at which allocated was highest."""
    retries: int = 0
    """How often cached blocks had to be given back to the device to go on."""
    fits: bool = True
    """Whether every request was served."""


class Memory:
    """The state of an allocator while a trace is replayed."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_reserved = self.retries = 0

    def malloc(self, identity: int, request: int) -> bool:
        """Serve a request; False where the capacity does not allow it."""
        raise NotImplementedError

    def free(self, identity: int) -> None:
        """Take back what a request was given; one for no bytes was given nothing."""
        raise NotImplementedError

    def reserve(self, size: int) -> bool:
        """Take bytes from the device."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True


@dataclass(frozen=True, slots=True)
class Allocator:
    """A model: how it starts, and the block that a request occupies before any unsplit rest."""

    name: str
    start: Callable[[int | None], Memory]
    rounded: Callable[[int], int]

    def replay(self, events: Sequence[Event], capacity: int | None = None) -> Replay:
        """Replay the events, within a capacity or without end.

        >>> native.replay([("a", 1, 3 << 20), ("f", 1, 0)]).peak_reserved == 20 << 20
        True
        >>> native.replay([("a", 1, 3 << 20)], capacity=10 << 20).fits
        False
        >>> expandable.replay([("a", 1, 3 << 20), ("a", 2, 30 << 20)]).peak_reserved == 40 << 20
        True
        >>> bfc.replay([("a", 1, 1000)], capacity=1 << 20).peak_allocated
        1024
        >>> found = host.replay([("a", 1, 1 << 20), ("f", 1, 0)])
        >>> found.peak_allocated, found.peak_reserved
        (1048576, 1052672)
        """
        memory = self.start(capacity)
        fits = True
        peak = peak_event = 0
        for index, (kind, identity, size) in enumerate(events):
            if kind == "f":
                memory.free(identity)
            elif kind == "a" and size:
                fits = memory.malloc(identity, size)
                if not fits:
                    break
                if memory.allocated > peak:
                    peak, peak_event = memory.allocated, index
        return Replay(peak, memory.peak_reserved, memory.allocated, peak_event, memory.retries, fits)

    def floor(self, events: Sequence[Event]) -> int:
        """The most rounded bytes live at once: no capacity below can serve them."""
        return most_live(events, self.rounded)


class Fits:
    """Answers "does it fit in so many bytes" for one trace, replaying only where the two bounds leave it open.

    Whether a trace fits is not monotone in the capacity (giving cached blocks back rearranges what follows), so
    nothing between the bounds is interpolated.
    """

    def __init__(
        self, events: Sequence[Event], allocator: Allocator, unlimited: Replay | None = None
    ) -> None:
        self._events = events
        self._allocator = allocator
        self.unlimited = unlimited or allocator.replay(events)
        self.floor = allocator.floor(events)

    def within(self, capacity: int) -> bool:
        """Whether the trace runs to its end within this capacity."""
        if capacity < self.floor:
            return False
        if capacity >= self.unlimited.peak_reserved:
            return True
        return self._allocator.replay(self._events, capacity).fits


class _Block:
    """A range of addresses, in a chain with those before and behind it."""

    __slots__ = ("address", "free", "mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.free = True
        self.mapped = True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int) -> _Block:
        """Keep so many bytes; returns the rest."""
        rest = _Block(self.address + size, self.size - size)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge_next(self) -> None:
        """Become one with the block behind."""
        after = self.next
        assert after is not None
        self.size += after.size
        self.next = after.next
        if after.next is not None:
            after.next.previous = self


class _FreeBlocks:
    """Free blocks sorted by (size, address): the best fit is the first at or above a size."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int, _Block]] = []

    def add(self, block: _Block) -> None:
        block.free = True
        insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        block.free = False
        self.blocks.pop(bisect_left(self.blocks, (block.size, block.address)))

    def best_fit(self, size: int) -> _Block | None:
        """Take the smallest block that is large enough."""
        index = bisect_left(self.blocks, (size, -1))
        if index == len(self.blocks):
            return None
        block = self.blocks.pop(index)[2]
        block.free = False
        return block

    def release(self, block: _Block) -> _Block:
        """Add a block, merged with its free neighbours; returns what it became."""
        before, after = block.previous, block.next
        if after is not None and after.free and after.mapped:
            self.remove(after)
            block.merge_next()
        if before is not None and before.free and before.mapped:
            self.remove(before)
            before.merge_next()
            block = before
        self.add(block)
        return block


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# PyTorch's CUDACachingAllocator, native backend, one stream, default settings: bit for bit. Requests are rounded to
# 512 B; up to 1 MiB they live in 2 MiB segments, up to 10 MiB in 20 MiB segments, above that in segments of their own
# rounded to 2 MiB. When the device refuses, every wholly free segment is given back and the request is tried once more.
MIN_BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_FROM = 10 * MIB
SEGMENT_ROUND = 2 * MIB


def _rounded_on_cuda(size: int) -> int:
    """The block a request occupies.

    >>> _rounded_on_cuda(1), _rounded_on_cuda(513)
    (512, 1024)
    """
    return max(MIN_BLOCK, _up(size, MIN_BLOCK))


class _Native(Memory):
    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.pools = {True: _FreeBlocks(), False: _FreeBlocks()}
        self.given: dict[int, tuple[_FreeBlocks, _Block]] = {}
        self.next_address = 0

    def malloc(self, identity: int, request: int) -> bool:
        size = _rounded_on_cuda(request)
        small = size <= SMALL
        pool = self.pools[small]
        block = pool.best_fit(size) or self._new_segment(size, small)
        if block is None:
            return False
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            pool.add(block.split(size))
        self.given[identity] = (pool, block)
        self.allocated += block.size
        return True

    def free(self, identity: int) -> None:
        if identity in self.given:
            pool, block = self.given.pop(identity)
            self.allocated -= block.size
            pool.release(block)

    def _new_segment(self, size: int, small: bool) -> _Block | None:
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE_FROM else _up(size, SEGMENT_ROUND)
        if not self.reserve(wanted):
            self.retries += 1
            self._give_back_free_segments()
            if not self.reserve(wanted):
                return None
        block = _Block(self.next_address, wanted)
        block.free = False
        # Segments never touch, so that blocks never merge across them.
        self.next_address += wanted + SEGMENT_ROUND
        return block

    def _give_back_free_segments(self) -> None:
        for pool in self.pools.values():
            for _, _, block in list(pool.blocks):
                if block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size


# The same with `expandable_segments:True`, modelled from its source. Each pool (small, large) is one long range of
# addresses into which pages are mapped as needed. No recorded trace of the real allocator in this mode exists here.

# Longer than any device is large: the range itself costs nothing.
RANGE = 1 << 44


class _Segment(_FreeBlocks):
    """One expandable segment: a chain of blocks, mapped or not, over one range of addresses."""

    def __init__(self, page: int) -> None:
        super().__init__()
        self.page = page
        first = _Block(0, RANGE)
        first.mapped = False
        self.unmapped = [first]

    def best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self.blocks, (size, -1))
        if index == len(self.blocks):
            return None
        # A block that could still grow counts as large as it may become, so that smaller holes are used first.
        while index + 1 < len(self.blocks) and self._may_become(index + 1) < self._may_become(index):
            index += 1
        block = self.blocks[index][2]
        self.remove(block)
        return block

    def _may_become(self, index: int) -> int:
        """The size of a free block, with the unmapped range that follows."""
        block = self.blocks[index][2]
        return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)

    def growable(self, size: int) -> _Block:
        """The lowest place where `size` bytes can be had by mapping, with a free block right before it."""
        for block in self.unmapped:
            before = block.previous
            start = before if before is not None and before.free and before.mapped else block
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
        self.unmapped.remove(block)
        pages = _up(size, self.page)
        if pages < block.size:
            self._add_unmapped(block.split(pages))
        block.mapped = True
        return self.release(block)

    def unmap_free_pages(self) -> int:
        """Give every whole free page back to the device; returns the bytes."""
        given = 0
        for _, _, block in list(self.blocks):
            first = _up(block.address, self.page)
            last = (block.address + block.size) // self.page * self.page
            if first >= last:
                continue
            self.remove(block)
            inner = block
            if first > block.address:
                inner = block.split(first - block.address)
                self.add(block)
            if inner.size > last - first:
                self.add(inner.split(last - first))
            given += inner.size
            self._unmap(inner)
        return given

    def _unmap(self, block: _Block) -> None:
        block.free, block.mapped = True, False
        before, after = block.previous, block.next
        if after is not None and not after.mapped:
            self.unmapped.remove(after)
            block.merge_next()
        if before is not None and not before.mapped:
            self.unmapped.remove(before)
            before.merge_next()
            block = before
        self._add_unmapped(block)

    def _add_unmapped(self, block: _Block) -> None:
        insort(self.unmapped, block, key=lambda each: each.address)


class _Expandable(Memory):
    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.pools = {True: _Segment(SMALL_SEGMENT), False: _Segment(LARGE_SEGMENT)}
        self.given: dict[int, tuple[_Segment, _Block]] = {}

    def malloc(self, identity: int, request: int) -> bool:
        size = _rounded_on_cuda(request)
        pool = self.pools[size <= SMALL]
        block = pool.best_fit(size) or self._grow(pool, size)
        if block is None:
            self.retries += 1
            self.reserved -= sum(each.unmap_free_pages() for each in self.pools.values())
            block = self._grow(pool, size)
            if block is None:
                return False
        if block.size - size >= MIN_BLOCK:
            pool.add(block.split(size))
        self.given[identity] = (pool, block)
        self.allocated += block.size
        return True

    def free(self, identity: int) -> None:
        if identity in self.given:
            pool, block = self.given.pop(identity)
            self.allocated -= block.size
            pool.release(block)

    def _grow(self, pool: _Segment, size: int) -> _Block | None:
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
        pool.remove(block)
        return block

    def _map(self, pool: _Segment, block: _Block, size: int) -> _Block | None:
        return pool.map(block, size) if self.reserve(_up(size, pool.page)) else None


# TensorFlow's BFC allocator on a GPU: best fit with coalescing, modelled from its source. By default TensorFlow takes
# its whole share of the device at the start, so with a capacity there is one region of that size. Without one, regions
# grow as they do with `set_memory_growth(True)`: each at least twice the last.
REGION_ROUND = 256
FIRST_REGION = 2 << 20
# A chunk is kept whole unless that would waste half of it, or this much.
MOST_WASTE = 128 << 20


class _Regions(Memory):
    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.chunks = _FreeBlocks()
        self.given: dict[int, _Block] = {}
        self.region = FIRST_REGION
        self.address = 0
        if capacity is not None:
            self._add_region(capacity // REGION_ROUND * REGION_ROUND)

    def malloc(self, identity: int, request: int) -> bool:
        size = _up(request, REGION_ROUND)
        chunk = self.chunks.best_fit(size)
        if chunk is None:
            if self.capacity is not None:
                return False
            self._grow(size)
            chunk = self.chunks.best_fit(size)
            assert chunk is not None, "the region was made for it"
        if chunk.size >= 2 * size or chunk.size - size >= MOST_WASTE:
            self.chunks.add(chunk.split(size))
        self.given[identity] = chunk
        self.allocated += chunk.size
        return True

    def free(self, identity: int) -> None:
        if identity in self.given:
            chunk = self.given.pop(identity)
            self.allocated -= chunk.size
            self.chunks.release(chunk)

    def _grow(self, size: int) -> None:
        fits = self.region >= size
        while self.region < size:
            self.region *= 2
        self._add_region(self.region)
        if fits:
            self.region *= 2

    def _add_region(self, size: int) -> None:
        self.reserve(size)
        self.chunks.add(_Block(self.address, size))
        self.address += size + REGION_ROUND  # regions never merge


# Host memory: what glibc's malloc keeps of the pages it took. Small requests live on the heap, which shrinks only from
# its top; large ones are mapped alone and returned at once. What counts as large moves: freeing a mapped block of up to
# 32 MiB raises the threshold to its size.
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
            self.high = max(self.high, _up(self.top, PAGE))
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
                self.high = _up(self.top, PAGE)
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


class _Host(Memory):
    """`allocated` counts the bytes asked for, `reserved` the pages behind them."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.heap = _Heap()
        self.mapped: dict[int, int] = {}
        self.on_heap: dict[int, tuple[int, int]] = {}
        self.asked: dict[int, int] = {}
        self.threshold = FIRST_THRESHOLD
        self.pages = 0

    def malloc(self, identity: int, request: int) -> bool:
        whole = request + ALIGN + HEADER
        if whole >= self.threshold:
            self.mapped[identity] = _up(whole, PAGE)
            self.pages += self.mapped[identity]
        else:
            size = _up(whole, HEADER)
            self.on_heap[identity] = (size, self.heap.take(size))
        self.asked[identity] = request
        self.allocated += request
        self.reserved = self.pages + self.heap.high
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self.capacity is None or self.reserved <= self.capacity

    def free(self, identity: int) -> None:
        self.allocated -= self.asked.pop(identity, 0)
        if identity in self.mapped:
            freed = self.mapped.pop(identity)
            self.pages -= freed
            if self.threshold < freed <= LAST_THRESHOLD:
                self.threshold = freed
        elif identity in self.on_heap:
            self.heap.give(*self.on_heap.pop(identity), trim=2 * self.threshold)


native = Allocator("native", _Native, _rounded_on_cuda)
expandable = Allocator("expandable", _Expandable, _rounded_on_cuda)
bfc = Allocator("bfc", _Regions, lambda size: _up(size, REGION_ROUND))
host = Allocator("host", _Host, int)
BY_NAME = {allocator.name: allocator for allocator in (native, expandable, bfc, host)}
