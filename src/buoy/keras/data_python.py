"""Data made by Python code: PyDataset by batch number, generators and torch loaders by reading again."""

from __future__ import annotations

import sys
import types
import zlib
from collections import deque
from collections.abc import Generator
from typing import Any

import keras
import numpy
from keras.src.trainers import data_adapters

from buoy.keras import rng
from buoy.keras.data import APPROXIMATE, Exactness, Replay, Say
from buoy.keras.data_numbered import Numbered
from buoy.keras.data_pipeline import skip
from buoy.keras.foreign_reads import by_data

_FINGERPRINT = 1 << 14  # numbers of each array
_REMEMBERED = 4096  # more batches than any prefetching runs ahead


class PyDatasetFeed:
    """A PyDataset in an order of our own, each batch made under its own seed, with the workers it asks for."""

    def __init__(self, dataset: Any, class_weight: Any, shuffle: bool, seed: int, say: Say) -> None:
        self._numbered = Numbered(dataset, shuffle, seed, say)
        self._adapter = data_adapters.PyDatasetAdapter(
            self._numbered, class_weight=class_weight, shuffle=False
        )
        self._first: int | None = None
        self._next = 0
        self._begun = False
        self.batches: int | None = dataset.num_batches
        self.exactness = self._numbered.exactness
        self.dataset = self._adapter.get_tf_dataset()

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """Batches are asked for by number: nothing before the offset is made again."""
        if self._numbered.position != (number, offset):
            self._numbered.at(number, offset)
        return iter(dataset)

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """The hooks of earlier epochs are called again in a new process: they may have moved things around."""
        if self._first is None:
            self._first = self._next = epoch
        self._pass_by(epoch)
        self._numbered.epoch = epoch
        if number != self._numbered.position[0] or not self._begun:
            self._begun = True
            self._numbered.at(number, offset)  # before the workers start: they take their copy of it
        self._adapter.on_epoch_begin()

    def close(self, epoch: int, number: int, offset: int) -> None:
        """What comes after this training finds the dataset as it left it; Keras ends an epoch before the first."""
        self._numbered.epoch_hook("on_epoch_end", -1)
        self._pass_by(epoch)

    def _pass_by(self, epoch: int) -> None:
        while self._next < epoch:
            self._numbered.epoch_hook("on_epoch_begin", self._next)
            self._numbered.epoch_hook("on_epoch_end", self._next)
            self._next += 1

    def epoch_ends(self, epoch: int) -> None:
        """Stops the workers, then the dataset's own hook."""
        self._numbered.epoch = epoch
        self._adapter.on_epoch_end()
        self._next = max(self._next, epoch + 1)

    def state(self, offset: int) -> dict[str, Any]:
        """The epoch this run began with, and what it is known by."""
        return {"first": self._first, "run": self._numbered.run}

    def load(self, state: dict[str, Any]) -> None:
        """Begin calling the hooks where the run began."""
        self._first = self._next = int(state["first"] or 0)
        self._numbered.run = state.get("run", self._numbered.run)


class ReplayedFeed:
    """A generator or a torch loader: a position is reached by reading again, compared with what was read before.

    Whatever it draws from the global generators of python, numpy and torch comes from a stream of its own.
    """

    def __init__(self, source: Any, seed: int, say: Say, options: dict[str, Any]) -> None:
        self._read = _Read(source, seed)
        self._say = say
        self._expected: tuple[int, int] | None = None
        self.exactness = Exactness(reason="it is read again, and compared with what was read before")
        if isinstance(source, types.GeneratorType):
            self._what, self._endless = "the generator", True
            adapter = data_adapters.get_data_adapter(x=iter(self._read), **options)
        else:
            self._what, self._endless = "the loader", False
            adapter = data_adapters.get_data_adapter(x=source, **options)
            adapter._dataloader = self._read  # the same batches, drawn from the stream
        self.dataset = adapter.get_tf_dataset()
        self.batches: int | None = adapter.num_batches
        self._opened = 0

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """Reads up to the position; a generator has no beginning to return to, so all of it is read."""
        while self._endless and self._opened < number:
            skip(iter(dataset), sys.maxsize)
            self._opened += 1
        self._opened = number + 1
        self._read.begin(number)
        iterator = iter(dataset)
        if offset:
            with Replay(offset, self._what, self._say):
                skip(iterator, offset)
            self._compare()
        return iterator

    def close(self, epoch: int, number: int, offset: int) -> None:
        """Nothing to do: whoever reads on finds other batches, and compares them."""

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """Nothing to do."""

    def epoch_ends(self, epoch: int) -> None:
        """Nothing to do."""

    def state(self, offset: int) -> dict[str, Any]:
        """What was read up to here, in one number."""
        return {"offset": offset, "fingerprint": self._read.fingerprint(offset)}

    def load(self, state: dict[str, Any]) -> None:
        """What reading again must give."""
        if state["fingerprint"] is not None:
            self._expected = state["offset"], state["fingerprint"]

    def _compare(self) -> None:
        if self._expected is None:
            return
        offset, fingerprint = self._expected
        self._expected = None
        if self._read.fingerprint(offset) != fingerprint:
            self.exactness = Exactness(
                APPROXIMATE,
                f"{self._what} gave other batches than in the attempt before",
                "use a keras.utils.PyDataset, or draw its random numbers from python's or numpy's global generator",
            )
            self._say(f"{self.exactness.reason}: the training goes on, but not as it would have")


class _Read:
    """Walks a source of batches under its own random stream, and keeps a running fingerprint of what it gave."""

    def __init__(self, source: Any, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._walked: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self.begin(0)

    def begin(self, number: int) -> None:
        """The next walk is this pass."""
        self._pass = number

    def fingerprint(self, count: int) -> int | None:
        """Of the first `count` batches; None when that is no longer known."""
        return dict(self._walked).get(count)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Generator[Any, None, None]:
        stream = rng.Stream(rng.number(self._seed, "replayed", self._pass))
        with stream, by_data():
            iterator = iter(self._source)
        self._walked.clear()
        count = fingerprint = 0
        while True:
            with stream, by_data():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            count += 1
            fingerprint = _fingerprint(batch, fingerprint)
            self._walked.append((count, fingerprint))
            yield batch


def _fingerprint(batch: Any, before: int) -> int:
    """A checksum of the beginning of every array: enough to tell another order or other augmentation."""
    for part in keras.tree.flatten(batch):
        if part is not None:
            array = numpy.asarray(part)
            if array.dtype.kind not in "OUS":
                before = zlib.crc32(array.reshape(-1)[:_FINGERPRINT].tobytes(), before)
    return before
