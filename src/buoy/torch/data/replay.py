"""One pass over the user's data, of each kind that data comes in; begun again in another process at the same place.

- over a map-style dataset (`IndexPass`): the place is found on indices alone, and the number of workers may change;
- over a loader with a state of its own (`StatefulPass`);
- over a list of batches (`SequencePass`);
- over anything else (`ReplayPass`): what was already seen is read again;
- over a loader that Hugging Face's accelerate prepared (`PreparedPass`): the loader's own work, over one of these.

To warn where the data is not the same after a resume, its amount and a checksum of the last batch are compared.
"""

from __future__ import annotations

import copy
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from buoy._compat.datasets import for_one_pass, loses_its_buffer
from buoy.torch.data.order import Course, DataMemory, Order
from buoy.torch.data.rng import Stream, forget_half_pair, mix, put, take
from buoy.units import format_duration

Say = Callable[[str], None]

_MOST = 2048  # elements of one tensor: enough to know other samples, or another augmentation
_DEEPEST = 4
_MOST_MEMBERS = 64
_SAY_REPLAY = 2.0  # seconds of reading again that are worth a line


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


class Pass:
    """One walk over a loader."""

    samples = 0
    """How many samples were handed out in this pass, over all processes that made it."""
    batches = 0
    """How many batches."""
    extent: dict[str, int]
    """How much data it goes over; saved with the place, to know other data from the same."""

    def __next__(self) -> Any:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What `Feeds.open` needs to resume here."""
        return {"samples": self.samples, "batches": self.batches, "extent": self.extent}

    def _counted(self, samples: int) -> None:
        self.samples += samples
        self.batches += 1


class IndexPass(Pass):
    """Over a map-style dataset: the place is a number of samples."""

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
        self._counted(size)
        self._last = mark(batch, size)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The number of samples, and the sampler's memory of before the pass."""
        left = self._course.left
        if left and not _are_equal(left, self._order.memory.generators()):
            self._warn()
        return {**super().state_dict(), "sampler": self._memory, "last": self._last}


class StatefulPass(Pass):
    """Over a loader that can say where it is."""

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
        self._counted(getattr(self._loader, "batch_size", None) or 1)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's own."""
        with self._stream:
            state = self._loader.state_dict()
        place = {"loader": state, "memory": self._memory, "stream": self._stream.state_dict()}
        return {**super().state_dict(), **place}


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


class SequencePass(Pass):
    """Over a list of batches."""

    def __init__(self, sequence: Sequence[Any], state: dict[str, Any] | None, say: Say) -> None:
        self.batches = self.samples = int(state["batches"]) if state else 0
        self._sequence = sequence
        self._last = state.get("last") if state else None
        if self._last and self.batches <= len(sequence):
            compare(sequence[self.batches - 1], self._last, self.batches, say)

    def __next__(self) -> Any:
        if self.batches >= len(self._sequence):
            raise StopIteration
        self._counted(1)
        batch = self._sequence[self.batches - 1]
        self._last = mark(batch, 1)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The number of batches."""
        return {**super().state_dict(), "last": self._last}


def _are_equal(states: Any, others: Any) -> bool:
    """Of generators: trees of tensors, arrays and numbers."""
    if isinstance(states, dict):
        return states.keys() == others.keys() and all(_are_equal(states[key], others[key]) for key in states)
    same = states == others
    return bool(same.all() if hasattr(same, "all") else same)


class ReplayPass(Pass):
    """Over something that only goes forward: an IterableDataset's loader, a generator, another library's loader."""

    def __init__(
        self,
        loader: Any,
        stream: Stream,
        state: dict[str, Any] | None,
        say: Callable[[str], None],
        memory: DataMemory | None,
    ) -> None:
        self._last: dict[str, Any] | None = None
        self._memory = begun_again(memory, state)
        self._size = getattr(loader, "batch_size", None) or 1
        self._workers = int(getattr(loader, "num_workers", 0))
        self._dataset = _Watched.over(loader) if self._workers == 0 else None
        self._stream = stream
        if self._dataset is not None:
            loader = copy.copy(loader)
            object.__setattr__(loader, "dataset", self._dataset)
        if state and state["workers"] != self._workers:
            say(
                f"the loader had {state['workers']} workers and has {self._workers} now: an IterableDataset "
                "yields another order then, so this resume is not exact"
            )
        known = state.get("dataset") if state else None
        if self._dataset is not None and known is not None:
            self._dataset.load_state_dict(known)
        with self._stream:  # also with workers: the loader draws a seed for them
            self._iterator = iter(loader)
        if state and self._dataset is not None and known is not None:
            self.batches, self.samples = int(state["batches"]), int(state["samples"])
            self._stream.load_state_dict(state["stream"])
        elif state:
            self._replay(int(state["batches"]), say, state.get("last"))

    def __next__(self) -> Any:
        if self._workers:
            batch = next(self._iterator)
        else:
            with self._stream:
                batch = next(self._iterator)
        self._counted(self._size)
        if self._dataset is None:
            self._last = mark(batch, self._size)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What another process needs to resume here."""
        state = {**super().state_dict(), "workers": self._workers, "memory": self._memory}
        if self._dataset is None:
            return {**state, "last": self._last}
        return {**state, "dataset": self._dataset.state_dict(), "stream": self._stream.state_dict()}

    def _replay(self, batches: int, say: Callable[[str], None], known: dict[str, Any] | None) -> None:
        start, batch = time.monotonic(), None
        for _ in range(batches):
            try:
                batch = next(self)
            except StopIteration:
                say(f"the data ended after {self.batches} batches, where it had given {batches} before")
                return
        if known and batches:
            compare(batch, known, self.batches, say)
        took = time.monotonic() - start
        if took > _SAY_REPLAY:
            say(
                f"read {batches} batches again to find the place ({format_duration(took)}): this data only goes "
                "forward. A dataset with state_dict() and load_state_dict(), or torchdata's StatefulDataLoader, "
                "avoids it"
            )


class _Watched(IterableDataset[Any]):
    """An iterable dataset with a state of its own; knows also when it is exhausted, which that state may not say."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._exhausted = False

    @staticmethod
    def over(loader: Any) -> _Watched | None:
        """The loader's dataset, if it can say where it is."""
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, IterableDataset) and has_state(dataset) and not loses_its_buffer(dataset):
            return _Watched(for_one_pass(dataset))
        return None

    def __iter__(self) -> Iterator[Any]:
        if not self._exhausted:
            yield from self._dataset
        self._exhausted = True

    def __len__(self) -> int:
        return len(self._dataset)

    def state_dict(self) -> dict[str, Any]:
        """Where the dataset is."""
        return {"exhausted": self._exhausted, "own": self._dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._exhausted = bool(state["exhausted"])
        self._dataset.load_state_dict(state["own"])


def is_prepared(loader: Any) -> bool:
    """Whether this is a loader of accelerate's that reads for itself; a dispatcher's process 0 reads for others too."""
    kind = type(loader)
    return kind.__module__ == "accelerate.data_loader" and kind.__name__ == "DataLoaderShard"


def within(loader: Any) -> Any:
    """The `DataLoader` that a prepared one reads; any other loader as it is."""
    return loader.base_dataloader if is_prepared(loader) else loader


class PreparedPass(Pass):
    """A pass over a prepared loader: its own iteration, over a pass of ours."""

    def __init__(self, loader: Any, inner: Pass) -> None:
        self._loader, self._inner = loader, inner
        self.extent = inner.extent
        self.samples, self.batches = inner.samples, inner.batches
        self._place = inner.state_dict()
        """Of the last batch that was handed out."""
        self._ahead: deque[dict[str, Any]] = deque()
        """The places of those that were read since."""
        self._iterator = iter(loader)

    def __next__(self) -> Any:
        base = self._loader.base_dataloader
        self._loader.base_dataloader = _Reading(base, self._read)
        try:
            batch = next(self._iterator)
        finally:
            self._loader.base_dataloader = base
        self._place = self._ahead.popleft()
        self.samples, self.batches = int(self._place["samples"]), int(self._place["batches"])
        return batch

    def _read(self) -> Iterator[Any]:
        while True:
            try:
                batch = next(self._inner)
            except StopIteration:
                return
            self._ahead.append(self._inner.state_dict())
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place of the last batch that was handed out."""
        return self._place


class _Reading:
    """Stands for the loader within, but for the batches that come from it."""

    def __init__(self, loader: Any, read: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._read = loader, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._read()


def begun_again(memory: DataMemory | None, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the source remembers as a pass begins: restored where it is resumed. Its own state comes after."""
    if memory is not None and state and state.get("memory"):
        memory.restore(state["memory"])
    return memory.now() if memory is not None else None


def has_state(thing: object) -> bool:
    """It can say where it is, and go there."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def fingerprint(batch: Any) -> int | None:
    """The same for equal batches, in every process; None where nothing in it can be compared quickly.

    >>> fingerprint({"x": torch.ones(3)}) == fingerprint({"x": torch.ones(3)}) != fingerprint({"x": torch.zeros(3)})
    True
    >>> fingerprint(object()) is None
    True
    """
    try:
        return _add(batch, None, 0)
    except (RuntimeError, TypeError, ValueError):  # a kind of tensor that has no bytes
        return None


def mark(batch: Any, size: int) -> dict[str, Any]:
    """What is kept of the last batch: a resumed pass must come by the same one."""
    return {"samples": size, "print": fingerprint(batch)}


def compare(batch: Any, known: dict[str, Any], number: int, say: Callable[[str], None]) -> None:
    """Tell it where the batch that was made again is another one."""
    if known["print"] is not None and fingerprint(batch) != known["print"]:
        say(
            f"this resume is not bit for bit: batch {number} of this pass, made again, differs from the "
            "one before. The data depends on something that is not saved: an order shuffled in place, "
            "a count, an RNG; hint: shuffle a copy in each epoch; track counts and RNGs"
        )


def _add(value: Any, before: int | None, depth: int) -> int | None:
    if isinstance(value, torch.Tensor):
        data = _some_bytes(value)
    elif isinstance(value, (bool, int, float, str)):
        data = repr(value).encode()
    elif isinstance(value, bytes):
        data = value[: 8 * _MOST]
    elif _is_array(value):
        data = None if value.dtype.kind in "OV" else value.reshape(-1)[:_MOST].tobytes()
    elif depth < _DEEPEST and isinstance(value, (Mapping, list, tuple)):
        members = list(value.values()) if isinstance(value, Mapping) else value
        for member in members[:_MOST_MEMBERS]:
            before = _add(member, before, depth + 1)
        return before
    else:
        data = None
    return before if data is None else zlib.crc32(data, before or 0)


def _some_bytes(tensor: torch.Tensor) -> bytes | None:
    """Of the first and the last of its elements; a GPU's are not waited for."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    if len(flat) > _MOST:
        flat = torch.cat([flat[: _MOST // 2], flat[-_MOST // 2 :]])
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def extent_of(loader: Any) -> dict[str, int]:
    """The samples of its dataset, those of a pass where they are others, and the batch size; what can be known.

    >>> extent_of([1, 2, 3])
    {'batches': 3}
    """
    if not hasattr(loader, "dataset"):
        length = length_of(loader)
        return {} if length is None else {"batches": length}
    size = getattr(loader, "batch_size", None)
    drawn = length_of(getattr(loader, "sampler", None))
    samples = length_of(loader.dataset)
    found = {"samples": samples, "drawn": drawn if drawn != samples else None, "batch_size": size}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def changed(then: dict[str, int] | None, now: dict[str, int]) -> str | None:
    """What to say where a pass resumes over other data; None when all that is known of both is the same.

    >>> changed({"samples": 100, "batch_size": 10}, {"samples": 120, "batch_size": 10})  # doctest: +ELLIPSIS
    'this resume is not bit for bit: the checkpoint was made with 100 samples, now there are 120: ...'
    """
    then = then or {}
    words, other_data = [], False
    for name, unit in (("samples", "samples"), ("drawn", "samples in a pass"), ("batches", "batches")):
        if name in then and name in now and then[name] != now[name]:
            words.append(f"with {then[name]} {unit}, now there are {now[name]}")
            other_data = True
    if "batch_size" in then and "batch_size" in now and then["batch_size"] != now["batch_size"]:
        words.append(f"in batches of {then['batch_size']}, now they are of {now['batch_size']}")
    if not words:
        return None
    what = (
        "in the rest of this epoch some may come twice and some not at all; use the same data"
        if other_data
        else "the rest of this epoch is split into other batches; use the same batch size"
    )
    return f"this resume is not bit for bit: the checkpoint was made {'; '.join(words)}: {what}"


def length_of(thing: Any) -> int | None:
    """Its length; None where it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None
