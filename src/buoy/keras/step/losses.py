"""How much of the whole batch's loss each micro-batch's loss stands for.

A Keras loss is a numerator over a denominator: samples, unmasked tokens, or the sum of sample weights. The gradient
of the whole batch is the sum over micro-batches of the gradient of `loss * (its denominator / the whole batch's)`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import losses_replaced, mask_of

SUM = "sum"
"""Nothing is divided: each micro-batch counts whole."""
ROWS = "rows"
"""Divided by the number of values, which the samples share equally."""
AMOUNT = "amount"
"""Divided by something that varies from sample to sample: unmasked tokens, sample weights."""
SCALAR = "scalar"
"""A function of the user's returned one number; only the probe can tell what it was divided by."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One compiled loss on one micro-batch."""

    kind: str
    amount: Any
    """The denominator, as a scalar tensor; None where nothing is divided or nobody can see it."""


@dataclass(slots=True)
class Tracked:
    """A loss value on its way to Keras's `Mean` trackers."""

    total: Any
    elements: Any
    """How many values it is the sum of, for a loss without reduction; else None."""


Share = Callable[[int, Measured], Any]


def shared(compiled: Any, share: Share, tracked: dict[int, Tracked]) -> AbstractContextManager[None]:
    """Within it each compiled loss is multiplied by its share; what its tracker should hear goes into `tracked`."""
    return losses_replaced(compiled, lambda index, loss: _counted(index, loss, share, tracked))


def _counted(index: int, loss: Any, share: Share, tracked: dict[int, Tracked]) -> Callable[..., Any]:
    def counted(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value, measured = measure(loss, y_true, y_pred, sample_weight)
        value = value * tf.cast(share(index, measured), value.dtype)
        tracked[index] = summed(value)
        return value

    return counted


def summed(value: Any) -> Tracked:
    """The value as one number, with the count of what was added up."""
    if value.shape.rank == 0:
        return Tracked(value, None)
    return Tracked(tf.reduce_sum(value), tf.size(value))


def measure(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Measured]:
    """A loss's value, and what it was divided by."""
    seen: list[Any] = []
    original = getattr(loss, "call", None)
    if original is None or type(loss).__call__ is not keras.losses.Loss.__call__:
        return loss(y_true, y_pred, sample_weight), Measured(SCALAR, None)

    def call(y_true: Any, y_pred: Any) -> Any:
        seen.append(original(y_true, y_pred))
        return seen[-1]

    loss.call = call
    try:
        value = loss(y_true, y_pred, sample_weight)
    finally:
        del loss.call
    values = tf.convert_to_tensor(seen[-1])
    if loss.reduction in (None, "none", "sum") and values.shape.rank != 0:
        return value, Measured(SUM, None)
    if values.shape.rank == 0:
        return value, Measured(SCALAR, None)
    mask = _both(mask_of(y_pred), mask_of(seen[-1]))
    if loss.reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        return value, Measured(AMOUNT, _weight_total(sample_weight, mask, value.dtype))
    if mask is not None:
        return value, Measured(AMOUNT, tf.reduce_sum(tf.cast(mask, value.dtype)))
    return value, Measured(ROWS, tf.size(values))


def _both(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return tf.logical_and(tf.cast(first, tf.bool), tf.cast(second, tf.bool))


def _weight_total(sample_weight: Any, mask: Any, dtype: Any) -> Any:
    if mask is None:
        return tf.reduce_sum(tf.cast(sample_weight, dtype))
    weights = tf.cast(mask, dtype)
    if sample_weight is not None:
        given = tf.cast(sample_weight, dtype)
        while given.shape.rank < weights.shape.rank:
            given = given[..., tf.newaxis]
        weights = weights * given
    return tf.reduce_sum(weights)
