"""Data that can only be read again: a generator or a torch loader, up to the position and compared with what it was."""

from __future__ import annotations

import sys
import time
import types
import zlib
from collections import deque
from collections.abc import Generator
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import adapter_of, read_by
from buoy.keras.data import rng
from buoy.keras.data.loader import APPROXIMATE, Exactness, Feed, Say
from buoy.units import format_duration

_FINGERPRINT = 1 << 14  # numbers of each array
_REMEMBERED = 4096  # more batches than any prefetching runs ahead


class Replay:
    """Says that batches are read again, and how long it took."""

    def __init__(self, count: int, what: str, say: Say) -> None:
        self._words = f"{count:,} batch{'es' if count > 1 else ''} of {what}"
        self._say = say
        self._began = 0.0

    def __enter__(self) -> None:
        self._say(f"reading {self._words} again, to reach the position of the last attempt")
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            took = format_duration(time.monotonic() - self._began)
            self._say(f"read {self._words} again in {took}")


@tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
def _skip_in_graph(iterator: Any, count: Any) -> None:
    for _ in tf.range(count):
        iterator.get_next()


def skip(iterator: Any, count: int) -> None:
    """Read so many batches and drop them; fewer when there are fewer."""
    try:
        if isinstance(iterator, tf.data.Iterator):
            _skip_in_graph(iterator, tf.constant(count))
        else:
            for _ in range(count):
                iterator.get_next()
    except tf.errors.OutOfRangeError:
        pass  # fewer batches than before: the training loop will see the end itself


class ReplayedFeed(Feed):
    """A generator or a torch loader: a position is reached by reading again, compared with what was read before.

    Whatever it draws from the global RNGs of python, numpy and torch comes from a stream of its own.
    """

    def __init__(self, source: Any, seed: int, say: Say, options: dict[str, Any]) -> None:
        self._read = _Read(source, seed)
        self._say = say
        self._expected: tuple[int, int] | None = None
        self.exactness = Exactness(reason="it is read again, and compared with what was read before")
        if isinstance(source, types.GeneratorType):
            self._what, self._endless = "the generator", True
            adapter = adapter_of(x=iter(self._read), **options)
        else:
            self._what, self._endless = "the loader", False
            adapter = adapter_of(x=source, **options)
            read_by(adapter, self._read)  # the same batches, drawn from the stream
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
                f"{self._what} gave different batches than in the last attempt",
                "use a keras.utils.PyDataset, or draw its random numbers from python's or numpy's global RNG",
            )
            self._say(f"{self.exactness.reason}: training continues, but differs from an uninterrupted run")


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
        count = known = 0
        while True:
            with stream:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            count += 1
            known = fingerprint(batch, known, _FINGERPRINT)
            self._walked.append((count, known))
            yield batch


def fingerprint(batch: Any, before: int, most: int | None = None) -> int:
    """A checksum of all arrays, or of the beginning of each: enough to tell another order or other augmentation."""
    for part in keras.tree.flatten(batch):
        if part is None or isinstance(part, tf.SparseTensor | tf.RaggedTensor):
            continue
        array = numpy.asarray(part)
        if array.dtype.kind not in "OUS":
            before = zlib.crc32(array.reshape(-1)[:most].tobytes(), before)
    return before
