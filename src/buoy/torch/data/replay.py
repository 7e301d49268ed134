"""A pass over something that only goes forward: what was already seen is read again, or skipped by its own state.

One number for a batch: does a pass that is resumed come by the same data?

How much data a loader has: told when a pass goes on over another amount than it was begun with.
"""

from __future__ import annotations

import copy
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from buoy._compat.datasets import for_one_pass, loses_its_buffer
from buoy.torch.data.rng import Stream
from buoy.torch.data.sampler import DataMemory
from buoy.units import format_duration

_MOST = 2048  # elements of one tensor: enough to know other samples, or another augmentation
_DEEPEST = 4
_MOST_MEMBERS = 64


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
            f"this resume is not bit for bit: batch {number} of this pass, made again, is not what it was before. The "
            "data depends on something that is not saved: an order shuffled in place, a count, a generator; hint: "
            "shuffle a copy in each epoch; track counts and generators"
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


_SAY_REPLAY = 2.0  # seconds of reading again that are worth a line


class ReplayPass:
    """Over something that only goes forward: an IterableDataset's loader, a generator, another library's loader."""

    extent: dict[str, int]

    def __init__(
        self,
        loader: Any,
        stream: Stream,
        state: dict[str, Any] | None,
        say: Callable[[str], None],
        memory: DataMemory | None,
    ) -> None:
        self.samples = self.batches = 0
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
        self.samples += self._size
        self.batches += 1
        if self._dataset is None:
            self._last = mark(batch, self._size)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What another process needs to go on from here."""
        state: dict[str, Any] = {"samples": self.samples, "batches": self.batches, "workers": self._workers}
        state["extent"] = self.extent
        state["memory"] = self._memory
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


def begun_again(memory: DataMemory | None, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the source remembers as a pass begins: put back where it is resumed. Its own state comes after."""
    if memory is not None and state and state.get("memory"):
        memory.put_back(state["memory"])
    return memory.now() if memory is not None else None


def has_state(thing: object) -> bool:
    """It can say where it is, and go there."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def extent_of(loader: Any) -> dict[str, int]:
    """The samples of its dataset, those of a pass where they are others, and the batch size; what can be known.

    >>> extent_of([1, 2, 3])
    {'batches': 3}
    """
    if not hasattr(loader, "dataset"):
        length = _length(loader)
        return {} if length is None else {"batches": length}
    size = getattr(loader, "batch_size", None)
    drawn = _length(getattr(loader, "sampler", None))
    samples = _length(loader.dataset)
    found = {"samples": samples, "drawn": drawn if drawn != samples else None, "batch_size": size}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def changed(then: dict[str, int] | None, now: dict[str, int]) -> str | None:
    """What to say where a pass goes on over other data; None when all that is known of both is the same.

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
        else "the rest of this epoch is cut into other batches; use the same batch size"
    )
    return f"this resume is not bit for bit: the checkpoint was made {'; '.join(words)}: {what}"


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None
