"""Data that can be opened at a position: which kind of data this is, and how exactly it can be resumed.

A *pass* is one walk through the data from its beginning; without `steps_per_epoch` a pass is an epoch. A position
is a pass and the batches of it that were used. Each kind of data is a `Feed` that can be opened at a position.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from buoy.errors import UsageError
from buoy.units import format_duration

BITWISE = "bitwise"
SAME_DATA = "same-data"
APPROXIMATE = "approximate"


@dataclass(frozen=True, slots=True)
class Exactness:
    """What a resume gives back: the same bits, the same samples in the same order, or neither; and why."""

    grade: str = BITWISE
    reason: str = ""
    hint: str = ""


class Feed(Protocol):
    """Data for `fit` that can be opened at a position."""

    dataset: Any
    """A tf.data.Dataset with the batches of one pass."""
    batches: int | None
    """In one pass; None when that is unknown or endless."""
    exactness: Exactness

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """An iterator of pass `number` that begins after `offset` batches; `dataset` is ours, maybe distributed."""

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """An epoch begins at this position; called before `open`."""

    def epoch_ends(self, epoch: int) -> None:
        """An epoch is over (-1: before the first one, as Keras has it)."""

    def close(self, epoch: int, number: int, offset: int) -> None:
        """The training is done, by an attempt before: leave the data as it left them at this position."""

    def state(self, offset: int) -> dict[str, Any]:
        """What a new process needs beside the position."""

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of the process before; called before anything is opened."""


Say = Callable[[str], None]


def feed_for(x: Any, y: Any, sample_weight: Any, seed: int, say: Say, **options: Any) -> Feed:
    """The feed for what `fit` was given; options are those of Keras's own data adapters."""
    from keras.src.trainers import data_adapters

    is_grain = getattr(data_adapters, "is_grain_dataset", lambda _: False)  # older versions do not know it
    if isinstance(x, data_adapters.data_adapter.DataAdapter) or is_grain(x):
        raise _not_ours(x)
    if isinstance(x, types.GeneratorType) or data_adapters.is_torch_dataloader(x):
        from buoy.keras.data_python import ReplayedFeed

        return ReplayedFeed(x, seed, say, {**options, "shuffle": False})
    # It would be ignored.
    quiet = {**options, "shuffle": False} if data_adapters.is_tf_dataset(x) else options
    adapter = data_adapters.get_data_adapter(x=x, y=y, sample_weight=sample_weight, **quiet)
    kind = type(adapter).__name__
    if kind == "ArrayDataAdapter":
        from buoy.keras.data_arrays import ArrayFeed

        return ArrayFeed(adapter, seed)
    if kind == "TFDatasetAdapter":
        from buoy.keras.data_pipeline import PipelineFeed

        return PipelineFeed(adapter.get_tf_dataset(), adapter.num_batches, say)
    if kind == "PyDatasetAdapter":
        from buoy.keras.data_python import PyDatasetFeed

        return PyDatasetFeed(x, options.get("class_weight"), bool(options.get("shuffle")), seed, say)
    raise _not_ours(x)


class Replay:
    """Tells people that batches are read again, and how long it took."""

    def __init__(self, count: int, what: str, say: Say) -> None:
        self._words = f"{count:,} batch{'es' if count > 1 else ''} of {what}"
        self._say = say
        self._began = 0.0

    def __enter__(self) -> None:
        self._say(f"reading again {self._words} to reach the place where the last attempt was")
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            took = format_duration(time.monotonic() - self._began)
            self._say(f"read {self._words} again in {took}")


def _not_ours(x: Any) -> UsageError:
    return UsageError(
        "this kind of data has no position that buoy could return to",
        received=f"{type(x).__module__}.{type(x).__qualname__}",
        expected="numpy arrays, tensors, a tf.data.Dataset, a PyDataset, a generator or a torch DataLoader",
        hint="wrap it in a keras.utils.PyDataset, whose batches have numbers",
    )
