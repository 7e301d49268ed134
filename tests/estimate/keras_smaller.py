"""Prints the shapes of Keras models rebuilt for smaller inputs; run by test_graph in a process of its own."""

from __future__ import annotations

import json

import keras
import tensorflow as tf

from buoy.estimate.child import EstimateError
from buoy.estimate.tracing.keras import _code_of, smaller_input
from tests.estimate.keras_builds import images

layers = keras.layers


class Scaled(layers.Layer):
    """A layer of the person's own."""

    def call(self, x):
        return 2 * x


def nested():
    inner = keras.Sequential([layers.Input((64, 64, 3)), layers.Conv2D(4, 3, strides=2)], name="inner")
    seen = keras.Input((64, 64, 3))
    model = keras.Model(seen, layers.Dense(5)(layers.GlobalAveragePooling2D()(inner(Scaled()(seen)))))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model, (tf.zeros((4, 64, 64, 3)), tf.zeros((4, 5)))


def segmentation():
    model = keras.Sequential([layers.Input((64, 64, 3)), layers.Conv2D(1, 3, padding="same")])
    model.compile("adam", "mse")
    return model, (tf.zeros((4, 64, 64, 3)), tf.zeros((4, 64, 64, 1)))


def tokens():
    seen = keras.Input((20,), dtype="int32")
    model = keras.Model(seen, layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(seen))))
    model.compile("adam", "mse")
    return model, (tf.zeros((4, 20), "int32"), tf.zeros((4, 1)))


def features():
    model = keras.Sequential([layers.Input((20,)), layers.Dense(1)])
    model.compile("adam", "mse")
    return model, (tf.zeros((4, 20)), tf.zeros((4, 1)))


def told(build):
    model, batch = build()
    try:
        made, cut = smaller_input(model, tf.nest.map_structure(tf.convert_to_tensor, batch))
    except EstimateError as error:
        return error.message
    made.train_on_batch(*cut)
    # The code that the remedy prints, as it stands, makes such a batch of the one there was.
    names = {"keras": keras, "images": batch[0], "tokens": batch[0]}
    for code in _code_of(cut, ["MobileNetV3Small instead"] if cut[0].shape[1] == 32 else []).values():
        exec(code, names)
    assert cut[0].shape in (names["images"].shape, names["tokens"].shape)
    return [list(made.input_shape), *(list(leaf.shape) for leaf in cut), type(made.optimizer).__name__]


print(json.dumps({build.__name__: told(build) for build in (images, nested, segmentation, tokens, features)}))
