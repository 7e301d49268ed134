"""How large a pipeline's batches are, without taking one from it."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

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
        node = node._inputs()[0]
    size = getattr(node, "_batch_size", None)
    known = tf.get_static_value(size) if size is not None else None
    return int(known) if known is not None else None
