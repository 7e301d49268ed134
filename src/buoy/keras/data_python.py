"""Data made by Python code: PyDataset by batch number, generators and torch loaders by reading again."""

from __future__ import annotations

import random
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
from buoy.keras.data_pipeline import skip

_FINGERPRINT = 1 << 14  # numbers of each array
_REMEMBERED = 4096  # more batches than any prefetching runs ahead


class PyDatasetFeed:
    """A PyDataset in an order of our own, each batch made under its own seed, with the workers it asks for."""

    def __init__(self, dataset: Any, class_weight: Any, shuffle: bool, seed: int, say: Say) -> None:
        self._numbered = _Numbered(dataset, shuffle, seed, say)
        self._adapter = data_adapters.PyDatasetAdapter(
            self._numbered, class_weight=class_weight, shuffle=False
        )
        self._first: int | None = None
        self._next = 0
        self._begun = False
        self.batches: int | None = dataset.num_batches
        self.exactness = Exactness()
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
        while self._next < epoch:
            self._numbered.epoch_hook("on_epoch_begin", self._next)
            self._numbered.epoch_hook("on_epoch_end", self._next)
            self._next += 1
        self._numbered.epoch = epoch
        if number != self._numbered.position[0] or not self._begun:
            self._begun = True
            self._numbered.at(number, offset)  # before the workers start: they take their copy of it
        self._adapter.on_epoch_begin()

    def epoch_ends(self, epoch: int) -> None:
        """Stops the workers, then the dataset's own hook."""
        self._numbered.epoch = epoch
        self._adapter.on_epoch_end()
        self._next = max(self._next, epoch + 1)

    def state(self, offset: int) -> dict[str, Any]:
        """The epoch this run began with."""
        return {"first": self._first}

    def load(self, state: dict[str, Any]) -> None:
        """Begin calling the hooks where the run began."""
        self._first = self._next = int(state["first"] or 0)


class _Numbered(keras.utils.PyDataset):  # type: ignore[misc]
    """Somebody's PyDataset from a position on; batch `i` is the same whoever makes it, and when."""

    def __init__(self, inner: Any, shuffle: bool, seed: int, say: Say) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.epoch = -1
        self._inner = inner
        self._shuffle = shuffle
        self._seed = seed
        self._place: tuple[int, int, Any] = (0, 0, None)
        self.at(0, 0)
        threads = inner.workers > 1 and not inner.use_multiprocessing
        # Seeding what nobody draws from would only keep the threads waiting for each other.
        self._seeds = not threads or self._draws()
        if threads and self._seeds:
            say(
                f"{type(inner).__name__} draws from the global random state, which its {inner.workers} threads "
                "share: its batches are made one at a time; use_multiprocessing=True makes them in parallel"
            )

    @property
    def position(self) -> tuple[int, int]:
        """The pass, and the batches of it that were used when it was opened."""
        return self._place[:2]

    def at(self, number: int, offset: int) -> None:
        """Begin pass `number` after `offset` batches; in one assignment, since workers may be looking."""
        order = None
        total = self._inner.num_batches
        if total is not None and self._shuffle:
            order = numpy.arange(total)
            numpy.random.RandomState(rng.number(self._seed, "order", number)).shuffle(order)
        self._place = number, offset, order

    @property
    def num_batches(self) -> int | None:
        """What is left of this pass."""
        total = self._inner.num_batches
        return None if total is None else max(0, total - self._place[1])

    def __getitem__(self, place: int) -> Any:
        number, offset, order = self._place
        index = place + offset if order is None else int(order[place + offset])
        if not self._seeds:
            return self._inner[index]
        with rng.seeded(rng.number(self._seed, "batch", number, index)):
            if hasattr(self._inner, "total_batches_seen"):
                # ImageDataGenerator's flows seed themselves anew for each batch, from the batches they have made.
                self._inner.total_batches_seen = number * (self._inner.num_batches or 0) + place + offset
            return self._inner[index]

    def on_epoch_begin(self) -> None:
        """As the dataset has it."""
        self.epoch_hook("on_epoch_begin", self.epoch)

    def on_epoch_end(self) -> None:
        """As the dataset has it."""
        self.epoch_hook("on_epoch_end", self.epoch)

    def epoch_hook(self, name: str, epoch: int) -> None:
        """The dataset's own hook; what it shuffles is a function of the seed and the epoch."""
        with rng.seeded(rng.number(self._seed, name, epoch)):
            getattr(self._inner, name, _nothing)()

    def _draws(self) -> bool:
        """Whether making a batch moves python's or numpy's global generator."""
        with rng.seeded(self._seed & 0xFFFFFFFF):
            before = random.getstate(), numpy.random.random_sample()
            numpy.random.seed(self._seed & 0xFFFFFFFF)
            self._inner[0]
            return before != (random.getstate(), numpy.random.random_sample())


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
        with stream:
            iterator = iter(self._source)
        self._walked.clear()
        count = fingerprint = 0
        while True:
            with stream:
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


def _nothing() -> None:
    """The hook of a dataset that has none."""
