"""The order of a map-style loader's samples as a function of (seed, epoch): the user's own sampler, run apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from buoy.torch.data.rng import Stream
from buoy.torch.data.sampler import DataMemory
from buoy.torch.data.workers import Key

# These draw from the global generators for their first index only, so the training's need not be put back later.
_DRAW_ONCE = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
_TORCHDATA = "torchdata.stateful_dataloader.sampler"  # its samplers are torch's, with a state
_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_ListIterator: type = type(iter([]))


class Order:
    """Takes the place of a loader's sampler (`batch_sampler`, or `sampler` where nothing is batched).

    `begin` says where; iterating then yields what the user's sampler yields, from there on, each index with the
    number to seed its item with.
    """

    def __init__(self, loader: Any) -> None:
        self._batched = loader.batch_sampler is not None
        self._sampler = loader.batch_sampler if self._batched else loader.sampler
        self.memory = DataMemory.of_samplers(loader)
        self._next = Course(0, 0, 0)

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self, course: Course, memory: dict[str, Any] | None) -> dict[str, Any]:
        """Prepare the next iteration; `memory` is the sampler's own state before this pass, when it is resumed.

        Returns that state: with it the pass can be begun again.
        """
        if memory is not None:
            self.memory.put_back(memory)
        self._next = course
        return self.memory.now()

    def __iter__(self) -> Iterator[list[Key] | Key]:
        return self._keys(self._next)

    def _keys(self, course: Course) -> Iterator[list[Key] | Key]:
        place = course.skip
        for indices in self._batches(course) if self._batched else self._singles(course):
            course.sizes.append(len(indices))
            keys = [
                ((course.items + (place + offset) * _STRIDE) & _MASK, index)
                for offset, index in enumerate(indices)
            ]
            place += len(indices)
            yield keys if self._batched else keys[0]

    def _singles(self, course: Course) -> Iterator[list[Any]]:
        for index in _drawn(self._sampler, course.skip, course, self.memory):
            yield [index]

    def _batches(self, course: Course) -> Iterator[list[Any]]:
        sampler = self._sampler
        if type(sampler) is BatchSampler or _is_torchdatas(sampler, "BatchSampler"):
            indices = _drawn(sampler.sampler, course.skip, course, self.memory)
            while batch := list(islice(indices, sampler.batch_size)):
                if len(batch) < sampler.batch_size and sampler.drop_last:
                    return
                yield batch
            return
        left_out = 0
        for batch in _drawn(sampler, 0, course, self.memory, len):
            batch = list(batch)
            if left_out >= course.skip:
                yield batch
            else:
                left_out += len(batch)
                if left_out > course.skip:  # other batches than before: go on inside this one
                    yield batch[course.skip - left_out :]


class Course:
    """One iteration over an `Order`: its seeds, where it begins, and how many samples each batch has."""

    def __init__(self, order: int, items: int, skip: int) -> None:
        self.stream = Stream(order)
        self.items = items
        self.skip = skip
        self.sizes: deque[int] = deque()
        """Of the batches that were drawn and not handed out yet: workers load ahead."""
        self.left: dict[str, Any] = {}
        """Where the generators of loader and sampler were when the sampler had drawn last."""


def _one(index: Any) -> int:
    return 1


def _drawn(
    sampler: Any, skip: int, course: Course, memory: DataMemory, size: Callable[[Any], int] = _one
) -> Iterator[Any]:
    """What the sampler yields, drawn with random state of its own."""
    if type(sampler) is SequentialSampler:
        yield from range(skip, len(sampler))
        return
    nothing, given = object(), skip
    draws_once = type(sampler) in _DRAW_ONCE or _is_torchdatas(sampler, "RandomSampler")
    with course.stream:
        source = iter(sampler)
        if skip and next(source, nothing) is not nothing:
            _leave_out(source, skip - 1)
    while True:
        with course.stream if not given or not draws_once else nullcontext():
            item = next(source, nothing)
        course.left = memory.generators()
        if item is nothing:
            return
        given += size(item)
        yield item
        if draws_once and not course.left:
            yield from source
            return


def _leave_out(source: Any, count: int) -> None:
    """Go on by so many items; at once where they come from a list, as most samplers' do, however many they are."""
    items: Any = getattr(source, "gi_yieldfrom", None) or source
    from_a_list: bool = type(items) is _ListIterator
    if from_a_list and count <= items.__length_hint__():
        items.__setstate__(items.__reduce__()[2] + count)
    else:
        next(islice(source, count, count), None)


def _is_torchdatas(sampler: Any, name: str) -> bool:
    kind = type(sampler)
    return kind.__module__ == _TORCHDATA and kind.__name__ == name
