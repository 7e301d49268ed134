"""Keras build functions, loaded by path in the tracing child."""

from __future__ import annotations

import keras
import numpy as np

layers = keras.layers


def images():
    model = keras.Sequential([
        layers.Input((32, 32, 3)), layers.Conv2D(32, 3, padding="same", activation="relu"), layers.BatchNormalization(),
        layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10),
    ])  # fmt: skip
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (np.zeros((64, 32, 32, 3), "float32"), np.zeros((64,), "int64"))


def recurrent():
    model = keras.Sequential([layers.Input((20, 8)), layers.LSTM(16), layers.Dense(1)])
    model.compile("adam", "mse")
    return model, (np.zeros((4, 20, 8), "float32"), np.zeros((4, 1), "float32"))
