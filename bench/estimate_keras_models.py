"""The Keras trainings whose memory is measured and estimated: small enough for a CPU, of every usual kind."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

L = keras.layers
Built = tuple[Any, tuple[Any, Any]]


def mlp() -> Built:
    model = keras.Sequential(
        [L.Input((1024,)), *[L.Dense(2048, activation="relu") for _ in range(4)], L.Dense(10)]
    )
    return _classes(model, "adam", np.zeros((2048, 1024), "float32"))


def mlp_normed() -> Built:
    layers = []
    for _ in range(6):
        layers += [L.Dense(1024), L.BatchNormalization(), L.Activation("gelu"), L.Dropout(0.2)]
    model = keras.Sequential([L.Input((512,)), *layers, L.Dense(10)])
    return _classes(model, keras.optimizers.SGD(0.01, momentum=0.9), np.zeros((4096, 512), "float32"))


def convolutions() -> Built:
    model = keras.Sequential([L.Input((64, 64, 3))])
    for width in (32, 64, 128):
        model.add(_conv(width))
        model.add(_conv(width))
        model.add(L.MaxPooling2D())
    for layer in (L.Flatten(), L.Dense(256, activation="relu"), L.Dense(10)):
        model.add(layer)
    return _classes(model, "adam", np.zeros((64, 64, 64, 3), "float32"))


def resnet50() -> Built:
    return _application("ResNet50", 16, 96)


def mobilenet_v2() -> Built:
    return _application("MobileNetV2", 32, 96)


def mobilenet_v3() -> Built:
    return _application("MobileNetV3Small", 32, 128)


def efficientnet() -> Built:
    return _application("EfficientNetB0", 16, 96)


def densenet() -> Built:
    return _application("DenseNet121", 16, 96)


def xception() -> Built:
    return _application("Xception", 8, 128)


def unet() -> Built:
    x = start = L.Input((96, 96, 3))
    skips = []
    for width in (16, 32, 64):
        x = _conv(width)(_conv(width)(x))
        skips.append(x)
        x = L.MaxPooling2D()(x)
    x = _conv(128)(x)
    for width in (64, 32, 16):
        x = L.Concatenate()([L.Conv2DTranspose(width, 2, 2)(x), skips.pop()])
        x = _conv(width)(x)
    model = keras.Model(start, L.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy")
    return model, (np.zeros((16, 96, 96, 3), "float32"), np.zeros((16, 96, 96, 1), "float32"))


def transformer() -> Built:
    tokens = L.Input((128,), dtype="int32")
    x = L.Embedding(4000, 128)(tokens)
    for _ in range(4):
        x = L.LayerNormalization()(x + L.MultiHeadAttention(4, 32)(x, x))
        x = L.LayerNormalization()(x + L.Dense(128)(L.Dense(512, activation="gelu")(x)))
    model = keras.Model(tokens, L.Dense(4000)(x))
    return _classes(model, "adamw", np.zeros((16, 128), "int32"), (16, 128))


def text_convolutions() -> Built:
    model = keras.Sequential([
        L.Input((256,), dtype="int32"), L.Embedding(20000, 128), L.Conv1D(256, 5, activation="relu"),
        L.Conv1D(256, 5, activation="relu"), L.GlobalMaxPooling1D(), L.Dense(128, activation="relu"), L.Dense(2),
    ])  # fmt: skip
    return _classes(model, "rmsprop", np.zeros((64, 256), "int32"))


def autoencoder() -> Built:
    model = keras.Sequential([
        L.Input((64, 64, 3)), _conv(32, 2), _conv(64, 2),
        L.Conv2DTranspose(64, 3, 2, padding="same", activation="relu"),
        L.Conv2DTranspose(32, 3, 2, padding="same", activation="relu"), L.Conv2D(3, 3, padding="same"),
    ])  # fmt: skip
    model.compile("adam", "mse")
    images = np.zeros((128, 64, 64, 3), "float32")
    return model, (images, images)


def unrolled_lstm() -> Built:
    model = keras.Sequential([L.Input((20, 64)), L.LSTM(256, unroll=True), L.Dense(10)])
    model.compile("adam", "mse")
    return model, (np.zeros((256, 20, 64), "float32"), np.zeros((256, 10), "float32"))


def _conv(width: int, stride: int = 1) -> Any:
    return L.Conv2D(width, 3, stride, padding="same", activation="relu")


def _application(name: str, samples: int, side: int) -> Built:
    model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=100)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy())
    return model, (np.zeros((samples, side, side, 3), "float32"), np.zeros((samples,), "int64"))


def _classes(model: Any, optimizer: Any, inputs: Any, labels: tuple[int, ...] | None = None) -> Built:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (inputs, np.zeros(labels or (inputs.shape[0],), "int64"))
