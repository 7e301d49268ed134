"""The order of a map-style loader's samples as a function of (seed, epoch): the user's own sampler, run apart.

And what a sampler or an iterable dataset keeps from one pass to the next, so that a later pass can be begun again.
"""

from __future__ import annotations

import copy
import marshal
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from buoy.checkpoint.values import value_of
from buoy.torch.data.rng import Stream, generator_state, set_generator_state
from buoy.torch.data.workers import Key, is_the_users, own_generators

# These draw from the global generators for their first index only, so the training's need not be restored later.
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
            self.memory.restore(memory)
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
                if left_out > course.skip:  # other batches than before: resume inside this one
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


_MOST_BYTES = 1 << 24  # of one container: more is data, not memory, and would be in every checkpoint
_MOST_OWNERS = 64
_LOOKED_AT = 64  # members of a container whose size is estimated
_SCALARS = (bool, int, float, str)


class DataMemory:
    """Its own generators, plain values that it changes, and lists and arrays of such that it shuffles in place."""

    def __init__(
        self, owners: list[tuple[str, Any]], generators: Callable[[], dict[str, Any]], apart: object = None
    ) -> None:
        # The streams live as long as the script wants, and no longer: some build one for each epoch.
        self._owners = [(path, weakref.ref(owner)) for path, owner in owners]
        self._generators = generators  # asked each time: some put a new one in the place of the last
        self._apart = id(apart)
        """The data itself, which some samplers hold as well."""
        self._first = self._marks()

    @staticmethod
    def of_samplers(loader: DataLoader[Any]) -> DataMemory:
        """Of a loader's sampler and batch sampler, and of those they wrap."""
        owners: list[tuple[str, Any]] = []
        for path, owner in (("batch_sampler", loader.batch_sampler), ("sampler", loader.sampler)):
            for _ in range(4):  # samplers wrap samplers
                if not hasattr(owner, "__dict__"):
                    break
                owners.append((path, owner))
                owner, path = getattr(owner, "sampler", None), f"{path}.sampler"
        given = loader.generator  # the loader itself is let go when the script lets go of it

        def generators() -> dict[str, Any]:
            found = {
                f"{path}.{name}": value
                for path, owner in owners
                for name, value in vars(owner).items()
                if generator_state(value) is not None
            }
            return found if given is None else {**found, "generator": given}

        return DataMemory(owners, generators, loader.dataset)

    @staticmethod
    def of_stream(stream: Any, *beside: object) -> DataMemory:
        """Of an iterable dataset and those inside it, or of somebody's own class that can be iterated over."""
        owners = [
            (path, owner)
            for path, owner in _inside(stream)
            # A library's class that has a state of its own keeps all that matters there, except given generators.
            if hasattr(owner, "__dict__")
            and (is_the_users(type(owner)) or not hasattr(owner, "load_state_dict"))
        ]

        known = [
            weakref.WeakMethod(each) if isinstance(each, MethodType) else weakref.ref(each)
            for each in (stream, *beside)
        ]

        def generators() -> dict[str, Any]:
            found = own_generators(*(reference() for reference in known))
            return {str(place): held for place, held in enumerate(found)}

        return DataMemory(owners, generators)

    def now(self) -> dict[str, Any]:
        """What differs from newly built ones."""
        changed = {
            name: copy.deepcopy(self._value(name))
            for name, mark in self._marks().items()
            if name not in self._first or mark != self._first[name]
        }
        return {"values": changed, "generators": self.generators()}

    def between_passes(self) -> dict[str, Any] | None:
        """What the next pass depends on; None: nothing."""
        state = self.now()
        if not state["values"] and not state["generators"]:
            return None
        return {**state, "first": {name: self._first.get(name) for name in state["values"]}}

    def restore_between_passes(self, state: dict[str, Any], tracked: Collection[int]) -> None:
        """Give that back before the first pass of a process; what the script has set or tracks itself stays."""
        here = self._marks()
        untouched = {
            name: value for name, value in state["values"].items() if here.get(name) == state["first"][name]
        }
        mine = {name for name, owner in self._generators().items() if id(owner) not in tracked}
        generators = {name: value for name, value in state["generators"].items() if name in mine}
        self.restore({"values": untouched, "generators": generators})

    def generators(self) -> dict[str, Any]:
        """Where each generator is; one that has several names is read, and stored, once."""
        found = self._generators()
        states = {id(owner): generator_state(owner) for owner in found.values()}
        return {name: states[id(owner)] for name, owner in found.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Make them what they were at that time."""
        for name, value in state["values"].items():
            path, _, attribute = name.rpartition(".")
            owner = self._owner(path)
            if owner is not None:
                _put(owner, attribute, value)
        found = self._generators()
        for name, value in state["generators"].items():
            if name in found:
                set_generator_state(found[name], value)

    def _owner(self, path: str) -> Any:
        return next((reference() for at, reference in self._owners if at == path), None)

    def _value(self, name: str) -> Any:
        path, _, attribute = name.rpartition(".")
        return vars(self._owner(path))[attribute]

    def _marks(self) -> dict[str, Any]:
        """Plain values as they are, containers by a checksum: enough to see what changes, also in another process."""
        marks: dict[str, Any] = {}
        for path, reference in self._owners:
            owner = reference()
            if owner is None:
                continue
            # Torch's own keep no order.
            looks_inside = not type(owner).__module__.startswith("torch.utils.data")
            for name, value in vars(owner).items():
                if type(value) in _SCALARS:
                    marks[f"{path}.{name}"] = value
                elif looks_inside and id(value) != self._apart and (mark := _checksum(value)) is not None:
                    marks[f"{path}.{name}"] = mark
        return marks


def _inside(stream: Any) -> Iterator[tuple[str, Any]]:
    """The stream, and the datasets that it reads from (a ChainDataset's, a shuffling one's), by their paths."""
    left, seen = [("stream", stream)], {id(stream)}
    while left and len(seen) < _MOST_OWNERS:
        path, owner = left.pop()
        yield path, owner
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            members = list(value) if type(value) in (list, tuple) and len(value) <= _MOST_OWNERS else [value]
            for place, member in enumerate(members):
                if isinstance(member, IterableDataset) and id(member) not in seen:
                    seen.add(id(member))
                    left.append((f"{path}.{name}.{place}", member))


def _put(owner: Any, name: str, value: Any) -> None:
    """Into what is there, since others may hold it too; else in its place."""
    value = copy.deepcopy(value)  # the checkpoint's own may be loaded once more
    there = value_of(getattr(owner, name, None), generator_state, set_generator_state)
    if there is not None and not there.mismatches(value):
        there.load(value)
    else:
        setattr(owner, name, value)


def _checksum(value: Any) -> list[int] | None:
    """Of a container of plain numbers and texts, or of an array; None for anything else, and for what is too large."""
    if isinstance(value, torch.Tensor):
        value = value.numpy() if type(value) is torch.Tensor and _is_plain(value) else None
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        if value.dtype.kind not in "biuf" or value.nbytes > _MOST_BYTES:
            return None
        return [zlib.crc32(value.tobytes()), *value.shape]
    if type(value) not in (list, dict, deque) or _estimated(value) > _MOST_BYTES:
        return None
    try:
        # It knows plain values only, and is quick. Later versions write what is shared otherwise than what is not.
        data = marshal.dumps(list(value) if isinstance(value, deque) else value, 2)
    except ValueError:
        return None
    return [zlib.crc32(data), len(value)] if len(data) <= _MOST_BYTES else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.dtype is not torch.bfloat16
    )


def _estimated(container: Any) -> int:
    """About how many bytes its members take: a list of texts may be a whole data set."""
    members = list(container.values() if isinstance(container, dict) else container)
    some = members[:: max(1, len(members) // _LOOKED_AT)]
    return sum(map(_weight, some)) * len(members) // max(1, len(some))


def _weight(value: Any) -> int:
    inner = sum(map(sys.getsizeof, value)) // 6 if type(value) in (list, tuple, dict) else 0
    return sys.getsizeof(value) // 6 + inner  # an int is 28 bytes here and 5 there
