"""What a cut step computes, as far as it can be seen cheaply: each new kind of step is compared before it is used."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy.microbatch.asked import Asked, traits

FIRST, AGAIN = "first", "again"
_LOOKED_AT = 4096
"""Numbers of a float array that are looked at to see whether it holds a mask or labels."""


class Comparisons:
    """When whole and parts are compared: at the 1st, 2nd, 4th, 8th... cut step of each kind."""

    def __init__(self) -> None:
        self._asked = Asked()
        self._seen: set[Hashable] = set()
        self._made: Hashable = None

    def made(self, kind: Hashable) -> None:
        """A comparison of this kind was made just before its step."""
        self._made = kind

    def doubt(self, kind: Hashable) -> str:
        """To be added to a refusal, where steps that compute the same were cut before."""
        return self._asked.doubt(kind)

    def due(self, kind: Hashable) -> str | None:
        """FIRST or AGAIN where this step, which is counted, is to be compared; else None."""
        known = self._asked.known_as(kind)
        due, made = self._asked.is_due(kind, done=True), kind == self._made
        first, self._made = known not in self._seen, None
        self._seen.add(known)
        if not due or made:
            return None
        return FIRST if first else AGAIN


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
    return trained, tuple(bool(layer.trainable) for layer in model._flatten_layers())


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
    few = tf.cast(tf.reshape(values, [-1])[:_LOOKED_AT], tf.float64).numpy()
    return bool((few == numpy.rint(few)).all())
