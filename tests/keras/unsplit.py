"""Trains on batches that cannot be computed in parts: `plain` or `guarded`, and what ties their samples together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf
from keras import layers

import buoy

WIDTH = 512
Case = tuple[keras.Model, Any, numpy.ndarray, numpy.ndarray]


def deep(shape: tuple[int, ...], *first: keras.layers.Layer) -> keras.Model:
    """Seven results of the width are kept for the backward pass: 14 KiB of each row."""
    kept = [layers.Activation(name) for name in ("tanh", "sigmoid", "softplus") * 2]
    return keras.Sequential([keras.Input(shape), layers.Dense(WIDTH), *first, *kept, layers.Dense(1)])


def batch_norm(draw: numpy.random.Generator) -> Case:
    """Statistics of the whole batch."""
    x = draw.normal(size=(24_000, 16)).astype("float32")
    return deep((16,), layers.BatchNormalization()), "mse", x, x.sum(1, keepdims=True)


def tokens(draw: numpy.random.Generator) -> Case:
    """A mean over the tokens that are not padding, by a function of its own: samples have different numbers of them."""
    x = draw.normal(size=(1000, 24, 16)).astype("float32")
    counted = draw.random((1000, 24, 1)) < draw.random((1000, 1, 1))
    y = (x.sum(2, keepdims=True) * counted).astype("float32")

    def loss(wanted: Any, found: Any) -> Any:
        weight = tf.cast(wanted != 0, found.dtype)
        return tf.reduce_sum(tf.square(found - wanted) * weight) / tf.reduce_sum(weight)

    return deep((24, 16)), loss, x, y


def pairs(draw: numpy.random.Generator) -> Case:
    """Every sample is compared with every other: matrices of 5000 x 5000, 95 MiB each."""
    x = draw.normal(size=(5000, 16)).astype("float32")
    y = draw.normal(size=(5000, 32)).astype("float32")

    def loss(wanted: Any, found: Any) -> Any:
        alike = tf.sigmoid(tf.matmul(found, wanted, transpose_b=True))
        own = tf.range(tf.shape(alike)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, alike))

    return keras.Sequential([keras.Input((16,)), layers.Dense(32)]), loss, x, y


CASES: dict[str, Callable[[numpy.random.Generator], Case]] = {
    "batch_norm": batch_norm,
    "tokens": tokens,
    "pairs": pairs,
}


if __name__ == "__main__":
    kind, tie, folder = sys.argv[1:]
    keras.utils.set_random_seed(0)
    model, loss, x, y = CASES[tie](numpy.random.default_rng(0))
    model.compile(keras.optimizers.SGD(1e-4), loss)
    named = len(x) if kind == "named" else None  # the size is the user's own: it is tried as it is
    callbacks = [] if kind == "plain" else [buoy.keras.Guard(folder, micro_batch=named)]
    model.fit(x, y, batch_size=len(x), epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
