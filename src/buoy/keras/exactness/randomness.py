"""Randomness made the same for every sample, so that a whole batch and its parts can be compared.

A draw decides which way a computation goes (`if uniform(()) < 0.5: mix the samples`): so there are two sides, one with
draws near the low end of their range and one near the high end, and both are looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import random_functions
from buoy.microbatch.errors import CannotSplit

_FIXED = 1
_NEAR = 0.04
"""How far from the end of its range a draw may be."""
_OTHERS = ("gamma", "beta", "binomial", "categorical", "poisson")
_LAST_BITS = {"float64": 2.0**-51, "float32": 2.0**-22, "float16": 2.0**-9, "bfloat16": 2.0**-6}
_high: Any = None
"""A variable, so that one graph serves both sides."""
_drawn: list[str] = []
"""What was drawn since somebody has asked; in a graph, while it was traced."""


@contextmanager
def noted() -> Iterator[list[str]]:
    """Gives a list that what is drawn within it is noted in."""
    _drawn.clear()
    yield _drawn


@contextmanager
def on_side(high: bool) -> Iterator[None]:
    """Within it draws are near the low or the high end of their range."""
    _side().assign(high)
    try:
        yield
    finally:
        _side().assign(False)


@contextmanager
def same_for_every_sample() -> Iterator[None]:
    """Within it Keras's and TensorFlow's random functions draw one row and repeat it, whatever the seed.

    Where that is one number per sample, they differ by their last bit: who sorts by them to mix samples, mixes them.
    Other distributions have no two sides: that they were drawn is noted, and refused.
    """
    keras_random = random_functions()
    _side()
    ours: list[tuple[Any, str, Any]] = [
        (keras_random, "uniform", _keras_uniform),
        (keras_random, "randint", _randint),
        (keras_random, "normal", _keras_normal),
        (keras_random, "truncated_normal", _keras_normal),
        (keras_random, "dropout", _dropout(keras_random.dropout)),
        (keras_random, "shuffle", _shuffle),
        (tf.random, "uniform", _tf_uniform),
        (tf.random, "normal", _tf_normal),
        (tf.random, "truncated_normal", _tf_normal),
        (tf.random, "shuffle", _shuffle),
        (tf.random, "stateless_uniform", _stateless(_tf_uniform)),
        (tf.random, "stateless_normal", _stateless(_tf_normal)),
        (tf.random, "stateless_truncated_normal", _stateless(_tf_normal)),
        *_others(keras_random, "keras.random"),
        *_others(tf.random, "tf.random"),
    ]  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in ours if hasattr(module, name)]
    for module, name, function in ours:
        if hasattr(module, name):
            setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _others(module: Any, called: str) -> Iterator[tuple[Any, str, Any]]:
    for name in (*_OTHERS, *map("stateless_{}".format, _OTHERS)):
        if hasattr(module, name):
            yield module, name, _noted(f"{called}.{name}", getattr(module, name))


def _side() -> Any:
    global _high
    if _high is None:
        with tf.init_scope():
            _high = tf.Variable(False, trainable=False, name="buoy_high")
    return _high


def _row(shape: Any, draw: Callable[..., Any], last_bit: float) -> Any:
    """`draw` of one sample's shape, repeated for all; single numbers each so much smaller than the one before."""
    _drawn.append("row")
    given = isinstance(shape, (list, tuple, tf.TensorShape))
    dimensions = list(shape) if given else tf.unstack(tf.convert_to_tensor(shape))
    if not dimensions:
        return draw(())
    row = draw((1, *dimensions[1:]))
    if len(dimensions) > 1:
        return tf.repeat(row, dimensions[0], axis=0)
    steps = tf.cast(tf.range(dimensions[0]), row.dtype) * tf.cast(last_bit, row.dtype)
    return row * (1 - steps)


_draw_uniform = tf.random.stateless_uniform
_draw_normal = tf.random.stateless_normal


def _unit(shape: Any, dtype: Any, *, apart: bool = True) -> Any:
    """Between 0 and 1, near the end that is looked at; rows are apart by their last bit."""

    def draw(shape: Any) -> Any:
        near = _NEAR * _draw_uniform(shape, (_FIXED, _FIXED), dtype=tf.as_dtype(dtype))
        return tf.where(_side(), 1 - near, near)

    return _row(shape, draw, _LAST_BITS[tf.as_dtype(dtype).name] if apart else 0.0)


def _signed(shape: Any, dtype: Any) -> Any:
    """Of a normal distribution; what is positive on one side is negative on the other."""

    def draw(shape: Any) -> Any:
        drawn = _draw_normal(shape, (_FIXED, _FIXED), dtype=tf.as_dtype(dtype))
        return tf.where(_side(), -drawn, drawn)

    return _row(shape, draw, _LAST_BITS[tf.as_dtype(dtype).name])


def _keras_uniform(
    shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
) -> Any:
    dtype = dtype or keras.config.floatx()
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return low + (high - low) * _unit(shape, dtype)


def _keras_normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    dtype = dtype or keras.config.floatx()
    return tf.cast(mean, dtype) + tf.cast(stddev, dtype) * _signed(shape, dtype)


def _randint(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
    low, high = tf.cast(minval, "float64"), tf.cast(maxval, "float64")
    drawn = tf.floor(low + (high - low) * _unit(shape, "float64", apart=False))
    return tf.cast(tf.clip_by_value(drawn, low, high - 1), dtype)


def _tf_uniform(
    shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32, seed: Any = None, name: Any = None,
    **_: Any,
) -> Any:  # fmt: skip
    if tf.as_dtype(dtype).is_integer:
        kind = tf.as_dtype(dtype)
        whole = minval is None or maxval is None
        return _randint(shape, kind.min if whole else minval, kind.max if whole else maxval, dtype)
    return _keras_uniform(shape, minval, 1.0 if maxval is None else maxval, dtype)


def _tf_normal(
    shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32, seed: Any = None, name: Any = None,
    **_: Any,
) -> Any:  # fmt: skip
    return _keras_normal(shape, mean, stddev, dtype)


def _stateless(function: Callable[..., Any]) -> Callable[..., Any]:
    """The seed comes second there."""

    def drawn(shape: Any, seed: Any, *args: Any, **kwargs: Any) -> Any:
        return function(shape, *args, **kwargs)

    return drawn


def _shuffle(value: Any, *_: Any, axis: int = 0, **__: Any) -> Any:
    """An order that is another one for the whole than for its parts."""
    _drawn.append("order")
    return tf.reverse(tf.convert_to_tensor(value), [axis])


def _noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        _drawn.append(name)
        return original(*args, **kwargs)

    return drawn


def refuse_others(drawn: set[str]) -> None:
    """Raise where something was drawn that has no two sides."""
    for name in sorted(drawn):
        if name.rpartition("_")[2].rpartition(".")[2] in _OTHERS:
            raise CannotSplit(
                "buoy cannot verify that splitting this batch keeps its gradient",
                received=f"the model draws with {name}",
                expected="draws of keras.random or tf.random that are uniform, normal, whole numbers or a dropout",
                hint="one of these in its place, or a smaller batch",
            )


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropped(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        _drawn.append("dropout")
        own = noise_shape if noise_shape is not None else [None] * len(inputs.shape)
        return original(inputs, rate, noise_shape=[1, *own[1:]], seed=_FIXED)

    return dropped
