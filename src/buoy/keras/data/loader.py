"""Data that can be opened at a position: which kind of data this is, and how exactly it can be resumed; arrays.

A *pass* is one walk through the data from its beginning; without `steps_per_epoch` a pass is an epoch. A position
is a pass and the batches of it that were used. Each kind of data is a `Feed` that can be opened at a position.
"""

from __future__ import annotations

import re
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import (
    adapter_of,
    arrays_in,
    gathered_sparse,
    is_adapter_or_grain,
    is_torch_loader,
    sliceable,
)
from buoy._compat.tensorflow import batch_size_of as size_in
from buoy._compat.tensorflow import inputs_of
from buoy.errors import UsageError
from buoy.keras.data import rng

BITWISE = "bitwise"
SAME_DATA = "same-data"
APPROXIMATE = "approximate"


@dataclass(frozen=True, slots=True)
class Exactness:
    """What a resume gives back: the same bits, the same samples in the same order, or neither; and why."""

    grade: str = BITWISE
    reason: str = ""
    hint: str = ""


def say_exactness(found: Exactness, say: Callable[[str], None]) -> None:
    """Where a resume will be less than exact."""
    if found.grade != BITWISE:
        say(f"a resume will not be bit for bit ({found.grade}): {found.reason}; hint: {found.hint}")


class Feed(ABC):
    """Data for `fit` that can be opened at a position."""

    dataset: Any
    """A tf.data.Dataset with the batches of one pass."""
    batches: int | None
    """In one pass; None when that is unknown or endless."""
    exactness: Exactness

    @abstractmethod
    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """An iterator of pass `number` that begins after `offset` batches; `dataset` is ours, maybe distributed."""

    @abstractmethod
    def state(self, offset: int) -> dict[str, Any]:
        """What a new process needs beside the position."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of the process before; called before anything is opened."""

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:  # noqa: B027 - most need nothing
        """An epoch begins at this position; called before `open`."""

    def epoch_ends(self, epoch: int) -> None:  # noqa: B027
        """An epoch is over (-1: before the first one, as Keras has it)."""

    def close(self, epoch: int, number: int, offset: int) -> None:  # noqa: B027
        """The training is done, by an attempt before: leave the data as it left them at this position."""

    def warn_of_others(self) -> AbstractContextManager[None]:
        """Within it, say so once when somebody else has this data shuffled: no checkpoint knows of that."""
        return nullcontext()


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
        "buoy cannot restore the position in this kind of data",
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


class ArrayFeed(Feed):
    """What Keras's ArrayDataAdapter gives, in an order of our own.

    As there, indices are shuffled and batched, and a batch is gathered inside the graph: no Python per step.
    """

    def __init__(self, adapter: Any, seed: int) -> None:
        arrays, self._samples, self._batch_size, self._shuffle = arrays_in(adapter)
        self._seed = seed
        self.batches: int | None = -(-self._samples // self._batch_size)
        self.exactness = Exactness()
        with tf.device("CPU:0"):
            self._indices = tf.Variable(
                tf.zeros([0], tf.int64), shape=[None], trainable=False, name="buoy_order"
            )
        self.dataset = self._make_dataset(arrays)

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """The order of this pass from its first unused sample on."""
        self._indices.assign(self.order(number)[offset * self._batch_size :])
        return iter(dataset)

    def order(self, number: int) -> Any:
        """The samples of a pass, in order; numpy promises that RandomState's streams never change."""
        order = numpy.arange(self._samples, dtype=numpy.int64)
        generator = numpy.random.RandomState(rng.number(self._seed, "order", number))
        if self._shuffle == "batch":  # Keras's word for: within each batch
            for begin in range(0, self._samples, self._batch_size):
                generator.shuffle(order[begin : begin + self._batch_size])
        elif self._shuffle:
            generator.shuffle(order)
        return order

    def state(self, offset: int) -> dict[str, Any]:
        """The order depends on these; another number of samples cannot be resumed bit for bit."""
        return {"samples": self._samples, "batch_size": self._batch_size}

    def load(self, state: dict[str, Any]) -> None:
        """The position is counted in batches of this size, over this many samples."""
        if state != self.state(0):
            self.exactness = Exactness(
                APPROXIMATE,
                f"the checkpoint was made with {state.get('samples')} samples in batches of "
                f"{state.get('batch_size')}, now there are {self._samples} in batches of {self._batch_size}",
                "use the same data and batch size",
            )

    def _make_dataset(self, inputs: Any) -> Any:
        size, indices = self._batch_size, self._indices

        def batches_of(_: Any) -> Any:
            order = indices.read_value()
            full = tf.size(order) // size * size
            whole = tf.data.Dataset.from_tensor_slices(tf.reshape(order[:full], [-1, size]))
            if self._samples % size == 0:
                return whole  # all batches have one size, which the graph may know
            rest = order[full:]
            return whole.concatenate(
                tf.data.Dataset.from_tensors(rest).take(tf.cast(tf.size(rest) > 0, tf.int64))
            )

        def grab_batch(chosen: Any, data: Any) -> Any:
            def grab(part: Any) -> Any:
                sparse = gathered_sparse(part, chosen)
                if sparse is not None:
                    return sparse
                if isinstance(part, (list, tuple, dict)):
                    return None  # "go inside"
                return tf.gather(part, chosen, axis=0) if tf.is_tensor(part) else part

            return keras.tree.traverse(grab, data)

        dataset = tf.data.Dataset.zip(
            (
                tf.data.Dataset.range(1).flat_map(batches_of),
                tf.data.Dataset.from_tensors(sliceable(inputs)).repeat(),
            )
        ).map(grab_batch, num_parallel_calls=tf.data.AUTOTUNE)
        options = tf.data.Options()
        # As in Keras: rewriting the graph would serialise the arrays with it.
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
