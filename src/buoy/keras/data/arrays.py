"""Arrays in memory: the order is a function of the seed and the pass, so any position is reached at once."""

from __future__ import annotations

from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import arrays_in, gathered_sparse, sliceable
from buoy.keras.data import rng
from buoy.keras.data.loader import Exactness


class ArrayFeed:
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

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """Nothing to do."""

    def epoch_ends(self, epoch: int) -> None:
        """Nothing to do."""

    def close(self, epoch: int, number: int, offset: int) -> None:
        """Nothing to do."""

    def state(self, offset: int) -> dict[str, Any]:
        """The order depends on these; another number of samples cannot be resumed bit for bit."""
        return {"samples": self._samples, "batch_size": self._batch_size}

    def load(self, state: dict[str, Any]) -> None:
        """The position is counted in batches of this size, over this many samples."""
        if state != self.state(0):
            self.exactness = Exactness(
                "approximate",
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
