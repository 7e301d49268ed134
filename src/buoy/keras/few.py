"""The few samples on which micro-batches are tried: those that would show it if they gave another gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf

SAMPLES = 5
"""Cut into 2 and 3: an even cut cannot tell a mean from a mean of means."""
FEWEST = 3
"""Where more do not fit."""


def few_of(data: Any) -> Any:
    """Samples with rare and with frequent labels; where these are copies, others too, or copies that are told apart.

    A mean that is weighted by class looks like a mean over samples until a rare class is among them. Copies cannot
    show whether a model compares its samples: blank images at the start of a batch, a batch of zeros.
    """
    whole = map_leaves(tf.convert_to_tensor, data)
    few = _rows(whole, _telling_rows(whole))
    if not are_copies(few, FEWEST):
        return few
    unlike = [row for leaf in _inputs(whole) for row in _rows_unlike_the_first(leaf)]
    if unlike:
        rows = [0, *sorted(set(unlike))[: SAMPLES - 1]]
        rows += [row for row in range(1, len(_inputs(whole)[0])) if row not in rows][: SAMPLES - len(rows)]
        return _rows(whole, rows)
    inputs = {id(leaf) for leaf in _inputs(few)}
    return map_leaves(lambda leaf: _spread(leaf) if id(leaf) in inputs else leaf, few)


def most_of(data: Any, count: int) -> Any:
    """As many samples as are computed at once where a batch is cut so."""
    rows = -(-len(keras.tree.flatten(data)[0]) // count)
    return _rows(map_leaves(tf.convert_to_tensor, data), list(range(rows)))


def repeated(few: Any) -> list[Any]:
    """Samples of these, some of them in both parts: as many as before, so that they need no other graph.

    A sum that is divided by the number of positives, or of boxes, looks like a sum as long as there is one of them.
    """
    rows = len(keras.tree.flatten(few)[0])
    first, rest = list(range(rows // 2)), list(range(rows - rows // 2))
    chosen = [first + rest]
    if rows > FEWEST:
        last = list(range(rows))[::-1]
        chosen.append(last[: len(first)] + last[: len(rest)])
    return [_rows(few, each) for each in chosen]


def are_copies(few: Any, first: int = SAMPLES) -> bool:
    """Whether all the first samples have the same input."""
    inputs = _inputs(few)
    alike = (min(_rows_unlike_the_first(leaf), default=first) >= first for leaf in inputs)
    return bool(inputs) and len(inputs[0]) > 1 and all(alike)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """The same structure; what is absent stays so."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), data)


def _rows(whole: Any, rows: list[int]) -> Any:
    return map_leaves(lambda leaf: tf.gather(leaf, rows), whole)


def _telling_rows(whole: Any) -> list[int]:
    """The numbers of the samples; the first ones where nothing speaks for others."""
    leaves = [leaf for leaf in keras.tree.flatten(whole) if leaf is not None]
    samples = len(leaves[0])
    chosen: list[int] = []
    if samples > SAMPLES:
        for leaf in leaves[::-1]:  # labels come after inputs
            if isinstance(leaf, tf.Tensor) and len(leaf) == samples:
                chosen += _rows_by_label(leaf)
    return list(dict.fromkeys([*chosen, *range(samples)]))[:SAMPLES]


def _rows_by_label(leaf: Any) -> list[int]:
    """One label per sample: the rarest, the most frequent twice, the least. Many: the most and the least padded."""
    first = leaf[0].numpy()  # of pictures, one is enough to see that they are no labels
    if first.dtype.kind not in "iub" and not (first.dtype.kind == "f" and (first == first.round()).all()):
        return []
    labels = leaf.numpy().reshape(len(leaf), -1)
    if labels.dtype.kind == "f" and not (labels == labels.round()).all():
        return []
    if labels.shape[1] != 1:
        padding = (labels == labels.min()).sum(axis=1)
        return [int(padding.argmax()), int(padding.argmin())] if padding.min() < padding.max() else []
    labels = labels.reshape(-1)
    values, counts = numpy.unique(labels, return_counts=True)
    if not 1 < len(values) < len(labels):
        return []
    by_count = values[counts.argsort(kind="stable")]  # two different ones also where all are as frequent
    frequent = numpy.flatnonzero(labels == by_count[-1])[:2]
    rare = numpy.flatnonzero(labels == by_count[0])[:1]
    least = numpy.flatnonzero(labels == values[0])[:1]  # -1, -100: what is to be ignored
    return [int(row) for row in (*rare, *frequent, *least)]


def _inputs(data: Any) -> list[Any]:
    """What the model reads, not what it is to say."""
    inputs = data[0] if isinstance(data, tuple | list) else data
    return [leaf for leaf in keras.tree.flatten(inputs) if leaf is not None]


def _rows_unlike_the_first(leaf: Any) -> list[int]:
    values = leaf.numpy()  # numpy says so when memory is short; some of TensorFlow's operations crash
    unlike = (values != values[:1]).reshape(len(values), -1).any(axis=1)
    return [int(row) for row in numpy.flatnonzero(unlike)]


def _spread(leaf: Any) -> Any:
    """The same numbers and a little more in each, another little in every sample; other kinds of input as they are."""
    if not leaf.dtype.is_floating:
        return leaf
    size = float(tf.reduce_max(tf.abs(tf.cast(leaf, "float64")))) or 1.0
    more = numpy.random.default_rng(0).uniform(0.0, size, leaf.shape)
    return leaf + tf.cast(more, leaf.dtype)
