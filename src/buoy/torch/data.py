"""A pass over the user's loader that can be begun again at any sample, in another process.

Four kinds of sources, one kind of `Pass`:

- a `DataLoader` over a map-style dataset: order and augmentation are functions of (seed, epoch, place), so that a
  place is found on indices alone and the number of workers may change;
- a loader with a state of its own (torchdata's `StatefulDataLoader` over a dataset with a state): that is used;
- a sequence: by index;
- anything else that can be iterated: what was already seen is read again, and the cost is told.

A loader that accelerate prepared is whichever of these the loader within it is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from buoy.torch.accelerate import PreparedPass, is_prepared, within
from buoy.torch.data_memory import DataMemory
from buoy.torch.every_pass import draw_in_every_pass
from buoy.torch.extent import changed, extent_of
from buoy.torch.fingerprint import compare, mark
from buoy.torch.hf_streams import for_one_pass, loses_its_buffer
from buoy.torch.order import Course, Order
from buoy.torch.replay import ReplayPass, begun_again, has_state
from buoy.torch.rng import Stream, forget_half_pair, mix, put, take
from buoy.torch.seeded import SeededDataset, SeededPasses, WorkerStart

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Which pass this is: everything its randomness depends on."""

    seed: int
    rank: int
    epoch: int
    loop: int

    def number(self, use: str) -> int:
        """A seed for one use. The order is the same on all ranks (their samplers share it out), the items' is not."""
        rank = self.rank if use == "items" else 0
        return mix(self.seed, rank, self.epoch, self.loop, use)


class Pass(Protocol):
    """One walk over a loader."""

    samples: int
    """How many samples were handed out in this pass, over all processes that made it."""
    batches: int
    """How many batches."""
    extent: dict[str, int]
    """How much data it goes over; saved with the place, to know other data from the same."""

    def __next__(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        """What `Feeds.open` needs to go on from here."""
        ...


class Feeds:
    """Opens passes; keeps what must live as long as the user's loader does (persistent workers)."""

    def __init__(self, say: Say, *, is_saved: bool = False) -> None:
        """`is_saved`: the training answers signals with a checkpoint, for which it may need more batches."""
        draw_in_every_pass()
        self._say, self._is_saved = say, is_saved
        # By the user's loader and no longer than it lives: some scripts build one for each epoch.
        self._twins: weakref.WeakKeyDictionary[Any, tuple[DataLoader[Any], Order]] = (
            weakref.WeakKeyDictionary()
        )
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        # By the id of what is iterated over, where that lives: scripts build a new loader around the same dataset.
        self._memories: dict[int, tuple[weakref.ref[Any], DataMemory]] = {}
        self._staying: weakref.WeakKeyDictionary[Any, tuple[DataLoader[Any], SeededPasses]] = (
            weakref.WeakKeyDictionary()
        )

    def open(self, loader: Any, place: Place, state: dict[str, Any] | None) -> Pass:
        """A pass over the loader, from its beginning or from where `state` was taken."""
        extent = extent_of(loader)
        if state and (told := changed(state.get("extent"), extent)) is not None:
            self._say(told)
            state = {**state, "last": None}  # there is nothing more to tell
        if is_prepared(loader):
            loader.set_epoch(
                place.epoch
            )  # it tells its sampler by a count that a resumed process begins at 0
        opened = self._open(within(loader), place, state)
        opened.extent = extent
        return PreparedPass(loader, opened) if is_prepared(loader) else opened

    def reopen(self, loader: Any, place: Place, lost: Pass) -> Pass | None:
        """The same pass from where it is, with new workers; None: it has none."""
        if not is_loader(loader) or not loader.num_workers:
            return None
        state, inner = lost.state_dict(), within(loader)
        for each in (inner, *self._twins.get(inner, ())[:1], *self._staying.get(inner, ())[:1]):
            if getattr(each, "_iterator", None) is not None:  # persistent workers, and they are gone
                object.__setattr__(each, "_iterator", None)
        return self.open(loader, place, state)

    def between_passes(self, loader: Any) -> dict[str, Any] | None:
        """What a loader's sampler or stream keeps from pass to pass; None: nothing, or it is not known."""
        memory = self._memory(loader)
        return memory.between_passes() if memory is not None else None

    def put_between_passes(self, loader: Any, state: dict[str, Any], tracked: Collection[int]) -> None:
        """Give it back, in another process; except to those objects (by id) that the run restores by itself."""
        memory = self._memory(loader)
        if memory is not None:
            memory.put_between_passes(state, tracked)

    def _memory(self, loader: Any) -> DataMemory | None:
        """Of what is iterated over in this process; what workers keep, they keep for themselves."""
        loader = within(loader)
        if _is_by_index(loader):
            return self._twin(loader)[1].memory
        if is_loader(loader):
            if loader.num_workers or not isinstance(loader.dataset, IterableDataset):
                return None
            stream, beside = loader.dataset, [loader.collate_fn]
        elif isinstance(loader, (Iterator, Sequence, Tensor)):
            return None
        else:
            stream, beside = loader, []
        known = self._memories.get(id(stream))
        if known is not None and known[0]() is stream:
            return known[1]
        try:
            memory = DataMemory.of_stream(stream, *beside)
            self._memories[id(stream)] = (weakref.ref(stream), memory)
        except TypeError:  # it cannot be known again
            return None
        return memory

    def _open(self, loader: Any, place: Place, state: dict[str, Any] | None) -> Pass:
        if _is_by_index(loader):
            return _IndexPass(*self._twin(loader), place, state, self._say)
        if _can_say_where_it_is(loader):
            return _StatefulPass(for_one_pass(loader), place, state, self._memory(loader))
        if isinstance(loader, Sequence):
            return _SequencePass(loader, state, self._say)
        stream, memory = Stream(place.number("stream")), self._memory(loader)
        if is_loader(loader) and isinstance(loader.dataset, IterableDataset):
            if not loader.num_workers:
                loader = _without_generator(loader)
            elif not _iterates_plainly(loader) or isinstance(loader.dataset, IterDataPipe):
                self._tell_of_staying_workers(loader)
            elif loader.persistent_workers:
                loader, passes = self._staying_twin(loader)
                passes.begin(place.number("stream"))
                # Whichever pass a process begins with, its workers are started alike.
                stream = Stream(mix(place.seed, "workers"))
            else:
                loader = _without_generator(loader)
        return ReplayPass(loader, stream, state, self._say, memory)

    def _tell_of_staying_workers(self, loader: DataLoader[Any]) -> None:
        if loader.persistent_workers and loader not in self._told:
            self._told.add(loader)
            self._say(
                "a resume will not be bit for bit where the workers of this loader draw random numbers: they stay "
                "from one pass to the next, and cannot be seeded for each; hint: persistent_workers=False"
            )

    def _staying_twin(self, loader: DataLoader[Any]) -> tuple[DataLoader[Any], SeededPasses]:
        """The user's loader of an IterableDataset whose workers stay; kept, as they are."""
        known = self._staying.get(loader)
        if known is not None:
            return known
        twin, passes = copy.copy(loader), SeededPasses(loader.dataset)
        replaced = {
            "dataset": passes,
            "worker_init_fn": WorkerStart(loader.worker_init_fn, is_saved=self._is_saved),
            "generator": None,
            "_iterator": None,
        }
        for name, value in replaced.items():
            object.__setattr__(twin, name, value)
        self._staying[loader] = (twin, passes)
        return twin, passes

    def _twin(self, loader: DataLoader[Any]) -> tuple[DataLoader[Any], Order]:
        """The user's loader over the wrapped dataset and order: every other property and override is kept."""
        known = self._twins.get(loader)
        if known is not None:
            return known
        twin, order = copy.copy(loader), Order(loader)
        replaced = {
            "dataset": SeededDataset(loader.dataset, loader.collate_fn),
            "batch_sampler" if loader.batch_sampler is not None else "sampler": order,
            "worker_init_fn": WorkerStart(loader.worker_init_fn, is_saved=self._is_saved),
            "_iterator": None,
        }
        for name, value in replaced.items():
            object.__setattr__(twin, name, value)  # a DataLoader refuses this, to protect one that is in use
        if not getattr(twin, "in_order", True):
            self._say("in_order=False is not used: batches that come in any order cannot be resumed")
            object.__setattr__(twin, "in_order", True)
        self._twins[loader] = (twin, order)
        return twin, order


def is_loader(value: object) -> bool:
    """Whether this is a DataLoader, whose place is kept by `batches`."""
    return isinstance(value, DataLoader)


class _IndexPass:
    """Over a map-style dataset: the place is a number of samples."""

    extent: dict[str, int]

    def __init__(
        self, twin: DataLoader[Any], order: Order, place: Place, state: dict[str, Any] | None, say: Say
    ) -> None:
        state = state or {}
        self.samples = int(state.get("samples", 0))
        self.batches = int(state.get("batches", 0))
        self._last: dict[str, Any] | None = None
        known: dict[str, Any] = state.get("last") or {}
        # The last batch is made once more: whatever keeps something of its own shows there.
        again = int(known.get("samples", 0))
        self._course = Course(place.number("order"), place.number("items"), self.samples - again)
        self._order, self._memory = order, order.begin(self._course, state.get("sampler"))
        self._course.catch_up(order.memory, state.get("generators"))
        dataset: Any = twin.dataset
        dataset.look_again()
        # Items are made in this process: mind the training's random state.
        self._apart = twin.num_workers == 0
        with Stream(place.number("workers")):  # a new iterator draws a seed for its workers
            self._iterator = iter(twin)
        self._course.begin()
        if again:
            self.samples, self.batches = self.samples - again, self.batches - 1
            compare(next(self, None), known, self.batches, say)
            self.samples, self.batches = int(state["samples"]), int(state["batches"])

    def __next__(self) -> Any:
        if self._apart:
            mine = take()
            try:
                batch = next(self._iterator)
            finally:
                put(mine)
        else:
            batch = next(self._iterator)
            forget_half_pair()
        size = self._course.sizes.popleft()
        self.samples += size
        self.batches += 1
        self._last = mark(batch, size)
        return batch

    def state_dict(self) -> dict[str, Any]:
        place: dict[str, Any] = {"samples": self.samples, "batches": self.batches, "extent": self.extent}
        place["sampler"], place["last"] = self._memory, self._last
        if (generators := self._course.describe(self._order.memory)) is not None:
            place["generators"] = generators
        return place


class _StatefulPass:
    """Over a loader that can say where it is."""

    extent: dict[str, int]

    def __init__(
        self, loader: Any, place: Place, state: dict[str, Any] | None, memory: DataMemory | None
    ) -> None:
        self.samples = int(state["samples"]) if state else 0
        self.batches = int(state["batches"]) if state else 0
        self._memory = begun_again(memory, state)
        self._loader = loader
        self._stream = Stream(place.number("stream"))
        with self._stream:
            if state:
                loader.load_state_dict(state["loader"])
            with _no_new_pass(loader) if state else nullcontext():
                self._iterator = iter(loader)
        if state:
            self._stream.load_state_dict(state["stream"])

    def __next__(self) -> Any:
        with self._stream:
            batch = next(self._iterator)
        self.samples += getattr(self._loader, "batch_size", None) or 1
        self.batches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        with self._stream:
            state = self._loader.state_dict()
        return {
            "samples": self.samples,
            "batches": self.batches,
            "extent": self.extent,
            "loader": state,
            "memory": self._memory,
            "stream": self._stream.state_dict(),
        }


@contextmanager
def _no_new_pass(loader: Any) -> Iterator[None]:
    """torchdata's nodes look ahead when they resume, and begin a new pass where theirs was at its end."""
    restarts = getattr(loader, "restart_on_stop_iteration", None)
    if restarts:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = restarts


class _SequencePass:
    """Over a list of batches."""

    extent: dict[str, int]

    def __init__(self, sequence: Sequence[Any], state: dict[str, Any] | None, say: Say) -> None:
        self.batches = self.samples = int(state["batches"]) if state else 0
        self._sequence = sequence
        self._last = state.get("last") if state else None
        if self._last and self.batches <= len(sequence):
            compare(sequence[self.batches - 1], self._last, self.batches, say)

    def __next__(self) -> Any:
        if self.batches >= len(self._sequence):
            raise StopIteration
        self.batches += 1
        self.samples += 1
        batch = self._sequence[self.batches - 1]
        self._last = mark(batch, 1)
        return batch

    def state_dict(self) -> dict[str, Any]:
        place = {"samples": self.samples, "batches": self.batches, "extent": self.extent}
        return {**place, "last": self._last}


def _without_generator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Its generator only seeds workers, and is not what it was after a death; the training may draw from it too."""
    if loader.generator is None or not _iterates_plainly(loader):
        return loader
    loader = copy.copy(loader)
    loader.generator = None
    return loader


def _is_by_index(loader: Any) -> bool:
    """A DataLoader that asks its sampler for indices, and whose dataset does not keep a state of its own."""
    if not is_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    if _is_torchdatas(loader):
        return not hasattr(loader.dataset, "state_dict")
    return _iterates_plainly(loader)


def _can_say_where_it_is(loader: Any) -> bool:
    if not has_state(loader) or loses_its_buffer(getattr(loader, "dataset", loader)):
        return False
    return not is_loader(loader) or _is_torchdatas(loader)


def _iterates_plainly(loader: DataLoader[Any]) -> bool:
    kind = type(loader)  # one that iterates in a way of its own (accelerate's) may not come by our order
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def _is_torchdatas(loader: Any) -> bool:
    return type(loader).__module__.startswith("torchdata.stateful_dataloader")
