"""A pass over something that only goes forward: what was already seen is read again, or skipped by its own state."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from buoy.torch.data_memory import DataMemory
from buoy.torch.fingerprint import compare, mark
from buoy.torch.hf_streams import for_one_pass, loses_its_buffer
from buoy.torch.rng import Stream
from buoy.units import format_duration

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
