"""A pass over the user's loader that can be begun again at any sample, in another process.

Four kinds of sources, one kind of `Pass`:

- a `DataLoader` over a map-style dataset: order and augmentation are functions of (seed, epoch, place), so that a
  place is found on indices alone and the number of workers may change;
- a loader with a state of its own (torchdata's `StatefulDataLoader` over a dataset with a state): that is used;
- a sequence: by index;
- anything else that can be iterated: what was already seen is read again, and the cost is told.

A loader that accelerate prepared is whichever of these the loader within it is.

A user's loader for a loop that is not ours (a Trainer's): the same batches after a death, from the same place.

A batch as a loader would make it, without taking one from it.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from buoy._compat.datasets import for_one_pass, loses_its_buffer
from buoy._compat.torch import forget_workers, has_usual_passes
from buoy.errors import UsageError
from buoy.flight.last_words import leave_out_ours
from buoy.torch.data import rng
from buoy.torch.data.order import Course, Order
from buoy.torch.data.replay import (
    ReplayPass,
    begun_again,
    changed,
    compare,
    extent_of,
    has_state,
    mark,
)
from buoy.torch.data.rng import Stream, forget_half_pair, initial_seed, mix, put, take
from buoy.torch.data.sampler import DataMemory
from buoy.torch.data.workers import SeededDataset, WorkerStart, draw_in_every_pass
from buoy.torch.state.accelerate import PreparedPass, is_prepared, within

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
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()
        # By the id of what is iterated over, where that lives: scripts build a new loader around the same dataset.
        self._memories: dict[int, tuple[weakref.ref[Any], DataMemory]] = {}

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
        for each in (inner, *self._twins.get(inner, ())[:1]):
            forget_workers(each)  # persistent ones, and they are gone
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
            return _IndexPass(
                *self._twin(loader), place, state, self._say, partial(self._warn_of_generator, loader)
            )
        if _can_say_where_it_is(loader):
            return _StatefulPass(for_one_pass(loader), place, state, self._memory(loader))
        if isinstance(loader, Sequence):
            return _SequencePass(loader, state, self._say)
        stream, memory = Stream(place.number("stream")), self._memory(loader)
        if is_loader(loader) and isinstance(loader.dataset, IterableDataset):
            self._warn_of_staying_workers(loader)
            loader = _without_generator(loader)
        return ReplayPass(loader, stream, state, self._say, memory)

    def _warn_of_generator(self, loader: DataLoader[Any]) -> None:
        if loader not in self._warned:
            self._warned.add(loader)
            self._say(
                "a resume from the middle of this epoch will not be bit for bit: the loop draws from the generator "
                "of the loader or its sampler; hint: give each a generator of its own"
            )

    def _warn_of_staying_workers(self, loader: DataLoader[Any]) -> None:
        if loader.persistent_workers and loader not in self._warned:
            self._warned.add(loader)
            self._say(
                "a resume will not be bit for bit where the workers of this loader draw random numbers: they stay "
                "from one pass to the next, and cannot be seeded for each; hint: persistent_workers=False"
            )

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
        }
        for name, value in replaced.items():
            object.__setattr__(twin, name, value)  # a DataLoader refuses this, to protect one that is in use
        forget_workers(twin)
        if not getattr(twin, "in_order", True):
            self._say("in_order=False is not used: batches that come in any order cannot be resumed")
            object.__setattr__(twin, "in_order", True)
        self._twins[loader] = (twin, order)
        return twin, order


def _are_equal(states: Any, others: Any) -> bool:
    """Of generators: trees of tensors, arrays and numbers."""
    if isinstance(states, dict):
        return states.keys() == others.keys() and all(_are_equal(states[key], others[key]) for key in states)
    same = states == others
    return bool(same.all() if hasattr(same, "all") else same)


def is_loader(value: object) -> bool:
    """Whether this is a DataLoader, whose place is kept by `batches`."""
    return isinstance(value, DataLoader)


class _IndexPass:
    """Over a map-style dataset: the place is a number of samples."""

    extent: dict[str, int]

    def __init__(
        self,
        twin: DataLoader[Any],
        order: Order,
        place: Place,
        state: dict[str, Any] | None,
        say: Say,
        warn: Callable[[], None],
    ) -> None:
        """`warn`: the loop draws from a generator of the loader."""
        state = state or {}
        self.samples = int(state.get("samples", 0))
        self.batches = int(state.get("batches", 0))
        self._last: dict[str, Any] | None = None
        self._warn = warn
        known: dict[str, Any] = state.get("last") or {}
        # The last batch is made once more: whatever keeps something of its own shows there.
        again = int(known.get("samples", 0))
        self._course = Course(place.number("order"), place.number("items"), self.samples - again)
        self._order, self._memory = order, order.begin(self._course, state.get("sampler"))
        dataset: Any = twin.dataset
        dataset.look_again()
        # Items are made in this process: mind the training's random state.
        self._apart = twin.num_workers == 0
        with Stream(place.number("workers")):  # a new iterator draws a seed for its workers
            self._iterator = iter(twin)
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
        left = self._course.left
        if left and not _are_equal(left, self._order.memory.generators()):
            self._warn()
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
    return kind.__iter__ is DataLoader.__iter__ and has_usual_passes(loader)


def _is_torchdatas(loader: Any) -> bool:
    return type(loader).__module__.startswith("torchdata.stateful_dataloader")


class ResumableLoader:
    """Looks like the loader it is built on; its order and its augmentation depend on (seed, epoch, place) only.

    >>> loader = ResumableLoader([10, 20, 30], print, seed=1, saved={"batches": 1})
    >>> list(loader), len(loader)
    ([20, 30], 3)
    """

    def __init__(
        self,
        loader: Any,
        say: Say,
        *,
        seed: int | None = None,
        saved: dict[str, Any] | None = None,
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        """`is_stopping`: a signal has asked the training to end, and may have ended the workers before it."""
        self.loader = loader
        """The user's own."""
        self.epoch = 0
        """Of the next pass."""
        self.seed = initial_seed() if seed is None else seed
        self.is_stopping = is_stopping
        self._feeds = Feeds(say, is_saved=True)
        self._saved = saved
        self._walk: _Walk | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> _Walk:
        self._walk = _Walk(self, self._feeds, Place(self.seed, 0, self.epoch, 0), self._saved)
        return self._walk

    def set_epoch(self, epoch: int) -> None:
        """Trainers tell it before each pass; samplers of the user's hear of it too."""
        self.epoch = epoch
        owners: list[Any] = [getattr(self.loader, name, None) for name in ("sampler", "batch_sampler")]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def arrived(self) -> None:
        """The place that was saved is reached: later passes begin at their beginning."""
        self._saved = None

    @property
    def batches(self) -> int:
        """How many were handed out in this pass."""
        return self._walk.batches if self._walk is not None else 0

    def place(self, batches: int) -> dict[str, Any] | None:
        """Where the pass was when so many of its batches had been trained; None: at its beginning."""
        return self._walk.place(batches) if self._walk is not None else self._saved


class _Walk:
    """One pass, opened when its first batch is asked for: a trainer may begin one and drop it again."""

    def __init__(
        self, owner: ResumableLoader, feeds: Feeds, place: Place, saved: dict[str, Any] | None
    ) -> None:
        self._owner, self._feeds, self._place, self._saved = owner, feeds, place, saved
        self._pass: Pass | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=3)
        # Where the end cannot be known, trainers read a batch ahead of the one that is trained.
        self._looks_ahead = not hasattr(owner.loader, "__len__") or _length(owner.loader) is None

    def __iter__(self) -> _Walk:
        return self

    def __next__(self) -> Any:
        try:
            return self._next()
        except BaseException as error:
            leave_out_ours(error)
            raise

    def _next(self) -> Any:
        if self._pass is None:
            self._pass = self._feeds.open(self._owner.loader, self._place, self._saved)
        if self._looks_ahead:
            self._recent.append(self._pass.state_dict())
        try:
            return next(self._pass)
        except StopIteration:
            raise
        except Exception:
            if not self._owner.is_stopping():
                raise
            again = self._feeds.reopen(self._owner.loader, self._place, self._pass)
            if again is None:
                raise
            self._pass = again
        return next(again)

    @property
    def batches(self) -> int:
        if self._pass is None:
            return int(self._saved["batches"]) if self._saved else 0
        return self._pass.batches

    def place(self, batches: int) -> dict[str, Any] | None:
        if self._pass is None:
            return self._saved
        if self._pass.batches == batches:
            return self._pass.state_dict()
        for state in self._recent:
            if state["batches"] == batches:
                return state
        return None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_source(value: object) -> bool:
    """Whether batches come from this.

    >>> is_source(DataLoader([1, 2, 3]))
    True
    """
    return isinstance(value, DataLoader)


def batch_of(loader: Any, name: str = "loader") -> Any:
    """The first samples of the data set as one batch: no iterator, no worker, and no random number is used up.

    >>> batch_of(DataLoader([1, 2, 3], batch_size=2))
    tensor([1, 2])
    """
    data, size = loader.dataset, loader.batch_size
    if isinstance(data, IterableDataset) or size is None or not hasattr(data, "__len__"):
        raise UsageError(
            f"a batch cannot be made without taking one from `{name}`",
            received="a loader with an iterable data set or a batch sampler of its own",
            expected="a sample batch",
            hint=f"`batch = next(iter({name}))`, then `%buoy plan` again",
        )
    places = list(range(min(size, len(data))))
    before = rng.capture()
    try:
        many = getattr(data, "__getitems__", None)
        return loader.collate_fn(many(places) if many is not None else [data[place] for place in places])
    finally:
        rng.restore(before)
