"""How much of a gradient is rounding: the same computation with what it reads moved by its last bit, at random.

Close to its goal a training subtracts nearly equal numbers: what is left of them, and so the whole gradient, may be
rounding. The order of the samples does not show that: where samples depend on each other, it changes far more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import tensorflow as tf

from buoy.keras.exactness.samples import map_leaves
from buoy.keras.step.snapshot import Snapshot
from buoy.microbatch.exactness import STRETCHES

_stretch: Any = None
"""A variable, so that one graph serves all of them."""
_LAST_BITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@contextmanager
def nudged(model: Any, few: Any, precision: str, draw: int) -> Iterator[Any]:
    """The samples, moved by up to one unit in the last place of this precision; within it weights are moved, and losses
    stretched, too."""
    last, random = _LAST_BITS[precision], numpy.random.default_rng(draw)
    stretch().assign(STRETCHES[draw])
    try:
        with _weights_moved(model, last, random):
            yield map_leaves(lambda leaf: _nudged(leaf, last, random), few)
    finally:
        stretch().assign(1.0)


def stretch() -> Any:
    """By which a loss is multiplied in a trial, and its gradient divided."""
    global _stretch
    if _stretch is None:
        with tf.init_scope():
            _stretch = tf.Variable(1.0, trainable=False, dtype=tf.float64, name="buoy_stretch")
    return _stretch


@contextmanager
def elsewhere(model: Any) -> Iterator[None]:
    """Within it the weights are others, far from the goal of the training, where a gradient is more than rounding."""
    with _weights_moved(model, 0.25, numpy.random.default_rng(0)):
        yield


@contextmanager
def _weights_moved(model: Any, most: float, random: numpy.random.Generator) -> Iterator[None]:
    weights = [weight for weight in model.trainable_weights if tf.as_dtype(weight.dtype).is_floating]
    before = Snapshot(weights)
    try:
        for weight in weights:
            weight.assign(_moved(weight.numpy(), most, random))
        yield
    finally:
        before.restore()  # takes no more memory than moving them did


def _moved(values: Any, most: float, random: numpy.random.Generator) -> Any:
    return (values * (1 + random.uniform(-most, most, values.shape))).astype(values.dtype)


def _nudged(leaf: Any, last: float, random: numpy.random.Generator) -> Any:
    """Whole numbers stay: an index or a class that is moved is another one."""
    if not leaf.dtype.is_floating:
        return leaf
    values = leaf.numpy()
    return tf.constant(
        numpy.where(values == numpy.rint(values), values, _moved(values, last, random)), leaf.dtype
    )
