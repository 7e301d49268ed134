"""The few samples on which micro-batches are tried: those that would show it if they gave another gradient.

What a split step computes, as far as it can be seen cheaply: each new kind of step is compared before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import layers_of
from buoy.microbatch.exactness import FEW_VALUES, Column, Wish, column_of, extremes, labels, picked, traits

SAMPLES = 5
"""Split into 2 and 3: an even split cannot tell a mean from a mean of means."""
FEWEST = 3
"""Where more do not fit."""
_LOOKED_AT = 1 << 20
"""Numbers of an array: of larger ones, every second, third, ... of each sample."""


def few_of(data: Any) -> Any:
    """The samples of the first trial."""
    return trials_of(data)[0]


def trials_of(data: Any) -> list[Any]:
    """For each trial samples that differ: in labels, weights, masks and padding, each array in its turn.

    A mean that is weighted by class looks like a mean over samples until a rare class is among them. Copies cannot
    show whether a model compares its samples (blank images at the start of a batch): in place of these, others.
    """
    whole = map_leaves(tf.convert_to_tensor, data)
    few, *others = (_rows(whole, rows) for rows in _telling_rows(whole))
    few = few if not are_copies(few, FEWEST) else _others(whole)
    return [few, *(other for other in others if not are_copies(other))]


def _others(whole: Any) -> Any:
    """The first sample, and those that are unlike it."""
    unlike = {row for leaf in _inputs(whole) for row in _rows_unlike_the_first(leaf)}
    rows = [0, *sorted(unlike)[: SAMPLES - 1]]
    rows += [row for row in range(1, len(_inputs(whole)[0])) if row not in rows][: SAMPLES - len(rows)]
    return _rows(whole, rows)


def most_of(data: Any, count: int) -> Any:
    """As many samples as are computed at once where a batch is split so."""
    rows = -(-len(keras.tree.flatten(data)[0]) // count)
    # Slices, not copies: where the device is full with so many samples, there is no room for them a second time.
    return map_leaves(lambda leaf: tf.convert_to_tensor(leaf)[:rows], data)


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


def _telling_rows(whole: Any) -> list[list[int]]:
    """The numbers of the samples, for each trial."""
    leaves = [leaf for leaf in keras.tree.flatten(whole) if leaf is not None]
    samples = len(leaves[0])
    if samples <= SAMPLES:
        return [list(range(samples))]
    one: list[list[Wish]] = []
    many: list[list[Wish]] = []
    for leaf in leaves[::-1]:  # labels come after inputs
        if isinstance(leaf, tf.Tensor) and len(leaf) == samples and _is_number(leaf.dtype):
            single, several = _columns(_thinned(leaf))
            one += map(labels, single)
            many += map(extremes, several)
    # One number per sample is mostly a label, a weight or a mask.
    return picked([*one, *many], samples, SAMPLES)


def _columns(flat: Any) -> tuple[list[Column], list[Column]]:
    """What each sample has one of, and how much of it is what padding, masks and rare labels are made of."""
    if flat.shape[1] < 2:
        return [_column(each) for each in flat.T], []
    single = [_column(each) for each in flat.T if _is_whole(each)] if flat.shape[1] <= FEW_VALUES else []
    nothing = numpy.isnan(flat).sum(axis=1)
    if not _is_whole(flat):
        return single, [_column((flat == 0).sum(axis=1)), _column(nothing)]
    values, counts = numpy.unique(flat, return_counts=True)
    highest = flat == values[-1]
    if len(values) == 2 and (highest.sum(axis=1) == 1).all():  # one of many: a label
        single.append(_column(highest.argmax(axis=1)))
    if len(values) > FEW_VALUES:
        values = numpy.stack([values[0], values[-1], values[counts.argmax()]])
    several = [(flat == value).sum(axis=1) for value in values]
    several += [_run(flat), _run(flat[:, ::-1])]  # padding by any number, before or behind
    return single, [*map(_column, several), _column(nothing)]


def _is_number(dtype: Any) -> bool:
    return bool(dtype.is_integer or dtype.is_floating or dtype.is_bool)


def _run(flat: Any) -> Any:
    """How often each row begins with the same number."""
    return numpy.cumprod(flat == flat[:, :1], axis=1).sum(axis=1)


def _is_whole(values: Any) -> bool:
    return bool((values == numpy.rint(values)).all())


def _thinned(leaf: Any) -> Any:
    """One row for each sample, of at most so many numbers in all."""
    flat = leaf.numpy().reshape(len(leaf), -1)
    each = max(2, _LOOKED_AT // len(flat))
    flat = flat if flat.shape[1] <= each else flat[:, :: -(-flat.shape[1] // each)]
    return flat.astype("float64")


def _column(values: Any) -> Column:
    return column_of(values.tolist())


def _inputs(data: Any) -> list[Any]:
    """What the model reads, not what it is to say."""
    inputs = data[0] if isinstance(data, tuple | list) else data
    return [leaf for leaf in keras.tree.flatten(inputs) if leaf is not None]


def _rows_unlike_the_first(leaf: Any) -> list[int]:
    values = leaf.numpy()  # numpy says so when memory is short; some of TensorFlow's operations crash
    unlike = (values != values[:1]).reshape(len(values), -1).any(axis=1)
    return [int(row) for row in numpy.flatnonzero(unlike)]


_KIND_LOOKED_AT = 4096
"""Numbers of a float array that are looked at to see whether it holds a mask or labels."""


def kind_of(data: Any, model: Any) -> Hashable:
    """Which weights learn, and what the batch looks like: its arrays, and whether they hold padding or ignored labels.

    >>> model = keras.Sequential()
    >>> kind_of(tf.constant([3, 2]), model) == kind_of(tf.constant([1, 2]), model)
    True
    >>> kind_of(tf.constant([0, 2]), model) == kind_of(tf.constant([1, 2]), model)
    False
    """
    leaves = tuple(None if leaf is None else _facts(leaf) for leaf in keras.tree.flatten(data))
    return learning(model), leaves


def learning(model: Any) -> Hashable:
    """Which weights are trained, and which layers are frozen."""
    trained = tuple(id(weight) for weight in model.trainable_weights)
    return trained, tuple(bool(layer.trainable) for layer in layers_of(model))


def _facts(leaf: Any) -> Hashable:
    """Kind and rank; where its numbers are labels, tokens, weights or a mask: negative ones? zeros? all the same?"""
    if not isinstance(leaf, tf.Tensor | numpy.ndarray):
        return type(leaf).__name__
    kind = tf.as_dtype(leaf.dtype)
    seen: tuple[Any, ...] = (kind.name, len(leaf.shape))
    if not (kind.is_integer or kind.is_bool or kind.is_floating) or 0 in leaf.shape:
        return seen
    values = tf.cast(leaf, tf.uint8) if kind.is_bool else tf.convert_to_tensor(leaf)
    least, most = tf.reduce_min(values).numpy(), tf.reduce_max(values).numpy()
    if kind.is_floating and not _whole_numbers(values):
        # Numbers of a continuous kind: weights of samples may still be 0.
        return (*seen, bool(least == most), bool(least == 0))
    zeros = bool(least <= 0 <= most) and bool(
        least == 0 or most == 0 or tf.reduce_any(tf.equal(values, tf.zeros((), values.dtype))).numpy()
    )
    return (*seen, traits(float(least), float(most), zeros))


def _whole_numbers(values: Any) -> bool:
    few = tf.cast(tf.reshape(values, [-1])[:_KIND_LOOKED_AT], tf.float64).numpy()
    return bool((few == numpy.rint(few)).all())
