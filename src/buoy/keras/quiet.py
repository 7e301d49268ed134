"""Randomness made the same for every sample, so that a whole batch and its parts can be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_FIXED = 1
_SHAPED = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")


@contextmanager
def same_for_every_sample() -> Iterator[None]:
    """Within it Keras's random functions draw one row and repeat it, from seeds that do not depend on the batch."""
    from keras.src.backend import random as keras_random

    names = [name for name in (*_SHAPED, "dropout") if hasattr(keras_random, name)]
    originals = {name: getattr(keras_random, name) for name in names}
    for name, original in originals.items():
        setattr(keras_random, name, _dropout(original) if name == "dropout" else _one_row(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(keras_random, name, original)


def _one_row(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drawn(shape: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["seed"] = _FIXED
        dimensions = (
            list(shape) if isinstance(shape, (list, tuple)) else tf.unstack(tf.convert_to_tensor(shape))
        )
        if not dimensions:
            return original(shape, *args, **kwargs)
        row = original((1, *dimensions[1:]), *args, **kwargs)
        return tf.repeat(row, dimensions[0], axis=0)

    return drawn


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropped(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        own = noise_shape if noise_shape is not None else [None] * len(inputs.shape)
        return original(inputs, rate, noise_shape=[1, *own[1:]], seed=_FIXED)

    return dropped
