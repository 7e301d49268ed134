"""Data that can be opened at a position: which kind of data this is, and how exactly it can be resumed.

A *pass* is one walk through the data from its beginning; without `steps_per_epoch` a pass is an epoch. A position
is a pass and the batches of it that were used. Each kind of data is a `Feed` that can be opened at a position.

How large a pipeline's batches are, without taking one from it.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from buoy._compat.keras import adapter_of, is_adapter_or_grain, is_torch_loader
from buoy._compat.tensorflow import batch_size_of as size_in
from buoy._compat.tensorflow import inputs_of
from buoy.errors import UsageError

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
    if is_adapter_or_grain(x):
        raise _not_ours(x)
    if isinstance(x, types.GeneratorType) or is_torch_loader(x):
        from buoy.keras.data.replay import ReplayedFeed

        return ReplayedFeed(x, seed, say, {**options, "shuffle": False})
    # It would be ignored.
    quiet = {**options, "shuffle": False} if hasattr(x, "element_spec") else options
    adapter = adapter_of(x=x, y=y, sample_weight=sample_weight, **quiet)
    kind = type(adapter).__name__
    if kind == "ArrayDataAdapter":
        from buoy.keras.data.arrays import ArrayFeed

        return ArrayFeed(adapter, seed)
    if kind == "TFDatasetAdapter":
        from buoy.keras.data.pipeline import PipelineFeed

        return PipelineFeed(adapter.get_tf_dataset(), adapter.num_batches, say)
    if kind == "PyDatasetAdapter":
        from buoy.keras.data.pydataset import PyDatasetFeed

        return PyDatasetFeed(x, options.get("class_weight"), bool(options.get("shuffle")), seed, say)
    raise _not_ours(x)


def _not_ours(x: Any) -> UsageError:
    return UsageError(
        "this kind of data has no position that buoy could return to",
        received=f"{type(x).__module__}.{type(x).__qualname__}",
        expected="numpy arrays, tensors, a tf.data.Dataset, a PyDataset, a generator or a torch DataLoader",
        hint="wrap it in a keras.utils.PyDataset, whose batches have numbers",
    )


# Behind these a batch is as large as before them.
_PASSES = re.compile(r"_?(Prefetch|Map|ParallelMap|Shuffle|Repeat|Cache|Options|Take|Skip)Dataset")


def is_source(value: object) -> bool:
    """Whether batches come from this."""
    return isinstance(value, tf.data.Dataset | keras.utils.PyDataset)


def batch_size_of(dataset: Any) -> int | None:
    """Samples in a batch; None where the pipeline does not tell.

    >>> batch_size_of(tf.data.Dataset.range(10).batch(4).prefetch(1))
    4
    """
    if not isinstance(dataset, tf.data.Dataset):
        size = getattr(dataset, "batch_size", None)
        return int(size) if isinstance(size, int) else None
    first = next(iter(tf.nest.flatten(dataset.element_spec)), None)
    if first is not None and first.shape.rank and first.shape[0] is not None:
        return int(first.shape[0])
    node = dataset
    while _PASSES.fullmatch(type(node).__name__):
        node = inputs_of(node)[0]
    size = size_in(node)
    known = tf.get_static_value(size) if size is not None else None
    return int(known) if known is not None else None
