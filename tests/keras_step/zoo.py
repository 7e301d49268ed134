"""Small Keras models, each with something of its own that a step must get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers

ROWS = 48


@dataclass
class Case:
    """A compiled model and a batch for it."""

    model: Any
    x: Any
    y: Any
    sample_weight: Any = None
    inexact: tuple[str, ...] = ()
    exact: bool = True
    """Whether micro-batches give the whole batch's gradient."""


@dataclass
class Options:
    """How to build: as a training would, or so that gradients can be compared."""

    optimizer: Callable[[], Any] | None = None
    drop: float = 0.2
    compile: dict[str, Any] = field(default_factory=dict)

    def chosen(self, usual: Any) -> Any:
        return self.optimizer() if self.optimizer is not None else usual


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def classes(*shape: int, top: int = 10, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, top, shape)


def mlp(o: Options) -> Case:
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(3):
        model.add(layers.Dense(64, activation="gelu", kernel_regularizer="l2"))
        model.add(layers.Dropout(o.drop))
    model.add(layers.Dense(4))
    model.compile(o.chosen(keras.optimizers.Adam(1e-2)), "mse", metrics=["mae"], **o.compile)
    return Case(model, numbers(ROWS, 64), numbers(ROWS, 4))


def batch_norm(o: Options) -> Case:
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(2):
        model.add(layers.Dense(64))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
        model.add(layers.Dropout(o.drop))
    model.add(layers.Dense(4))
    model.compile(o.chosen(keras.optimizers.Adam(1e-2)), "mse", metrics=["mae"], **o.compile)
    return Case(model, numbers(ROWS, 64), numbers(ROWS, 4), inexact=("batchnorm",), exact=False)


def cnn(o: Options) -> Case:
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, activation="relu")(inputs)
    x = layers.GroupNormalization(4)(x)
    x = layers.MaxPooling2D()(x)
    x = layers.SpatialDropout2D(o.drop)(x)
    x = layers.Conv2D(16, 3, activation="relu")(x)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    model.compile(o.chosen(sgd), loss, metrics=["accuracy"], **o.compile)
    return Case(model, numbers(ROWS, 16, 16, 3), classes(ROWS))


def lstm(o: Options) -> Case:
    inputs = keras.Input((3, 16))
    x = layers.LSTM(32, dropout=o.drop, return_sequences=True)(inputs)
    x = layers.GRU(16)(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile(o.chosen(keras.optimizers.RMSprop(1e-2)), "huber", **o.compile)
    return Case(model, numbers(ROWS, 3, 16), numbers(ROWS, 2))


def attention(o: Options) -> Case:
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 32)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8, dropout=o.drop)(x, x))
    x = layers.Dense(64, activation="gelu")(x)
    outputs = layers.Dense(50)(x)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(o.chosen(keras.optimizers.AdamW(1e-2)), loss, metrics=["accuracy"], **o.compile)
    return Case(model, classes(ROWS, 12, top=50), classes(ROWS, 12, top=6, seed=2))


def masked(o: Options) -> Case:
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(inputs)
    x = layers.LSTM(16, return_sequences=True)(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(o.chosen(keras.optimizers.Adam(1e-2)), loss, weighted_metrics=["accuracy"], **o.compile)
    tokens = classes(ROWS, 4, top=50)
    for row in range(ROWS):
        tokens[row, 1 + row % 3 :] = 0
    return Case(model, tokens, classes(ROWS, 4, top=3))


def half(o: Options) -> Case:
    policy = "mixed_float16" if keras.config.floatx() == "float32" else None
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="relu", dtype=policy),
            layers.Dropout(o.drop, dtype=policy),
            layers.Dense(4, dtype=keras.config.floatx()),
        ]
    )
    optimizer = o.chosen(keras.optimizers.Adam(1e-2))
    if policy is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=1024.0, dynamic_growth_steps=2
        )
    model.compile(optimizer, "mse", **o.compile)
    return Case(model, numbers(ROWS, 64), numbers(ROWS, 4))


def outputs(o: Options) -> Case:
    inputs = {"a": keras.Input((32,), name="a"), "b": keras.Input((16,), name="b")}
    x = layers.Dense(64, activation="relu")(layers.Concatenate()(list(inputs.values())))
    x = layers.Dropout(o.drop)(x)
    heads = {"number": layers.Dense(1, name="number")(x), "kind": layers.Dense(5, name="kind")(x)}
    model = keras.Model(inputs, heads)
    kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(
        o.chosen(keras.optimizers.Adam(1e-2)),
        loss={"number": "mse", "kind": kind},
        loss_weights={"number": 0.3, "kind": 0.01},
        metrics={"kind": ["accuracy"]},
        **o.compile,
    )
    x_values = {"a": numbers(ROWS, 32), "b": numbers(ROWS, 16)}
    return Case(model, x_values, {"number": numbers(ROWS, 1), "kind": classes(ROWS, top=5)})


class Spread(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return x


def added(o: Options) -> Case:
    model = keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(64, activation="relu", activity_regularizer="l2", kernel_regularizer="l1l2"),
            Spread(),
            layers.Dense(2),
        ]
    )
    model.compile(o.chosen(keras.optimizers.Nadam(1e-2)), "mae", **o.compile)
    return Case(model, numbers(ROWS, 32), numbers(ROWS, 2))


def weighted(o: Options) -> Case:
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    optimizer = o.chosen(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1))
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], **o.compile)
    weight = np.linspace(0.0, 3.0, ROWS).astype(keras.config.floatx())
    return Case(model, numbers(ROWS, 32), classes(ROWS, top=3), weight)


def average(o: Options) -> Case:
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="tanh"), layers.Dense(2)])
    optimizer = keras.optimizers.AdamW(
        1e-2,
        weight_decay=0.1,
        global_clipnorm=0.05,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
    )
    model.compile(o.chosen(optimizer), "mse", **o.compile)
    return Case(model, numbers(ROWS, 32), numbers(ROWS, 2))


def accumulated(o: Options) -> Case:
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="tanh"), layers.Dense(2)])
    model.compile(o.chosen(keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)), "mse", **o.compile)
    return Case(model, numbers(ROWS, 32), numbers(ROWS, 2))


class Sampling(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds, dtype=x.dtype)


def sampled(o: Options) -> Case:
    """Random at any time, as in a variational autoencoder; and a user's own compute_loss."""

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return keras.ops.mean(keras.ops.square(y - y_pred)) + sum(self.losses)

    inputs = keras.Input((32,))
    x = layers.Dense(64, activation="relu", kernel_regularizer="l2")(inputs)
    x = Sampling()(x) if o.drop else x
    model = Own(inputs, layers.Dense(2)(x))
    model.compile(o.chosen(keras.optimizers.Adam(1e-2)), **o.compile)
    return Case(model, numbers(ROWS, 32), numbers(ROWS, 2))


def measured(o: Options) -> Case:
    """A metric that is one number per batch."""
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(2)])

    def largest(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.max(keras.ops.abs(y_true - y_pred))

    model.compile(o.chosen(keras.optimizers.SGD(0.01)), "mse", metrics=[largest], **o.compile)
    return Case(model, numbers(ROWS, 32), numbers(ROWS, 2))


def own_loss(o: Options) -> Case:
    """A function of the user's that returns one number, a sum over the batch."""
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(2)])
    model.compile(
        o.chosen(keras.optimizers.Adam(1e-3)),
        lambda y_true, y_pred: keras.ops.sum(keras.ops.square(y_true - y_pred)),
        **o.compile,
    )
    return Case(model, numbers(ROWS, 32), numbers(ROWS, 2))


MODELS: dict[str, Callable[[Options], Case]] = {
    build.__name__: build
    for build in (
        mlp, batch_norm, cnn, lstm, attention, masked, half, outputs, added, weighted, average, accumulated,
        sampled, measured, own_loss,
    )
}  # fmt: skip
