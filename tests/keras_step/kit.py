"""What the checks of the Keras step share; imported first of all, since it says how TensorFlow is to start."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["TF_NUM_INTEROP_THREADS"] = "1"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # see tests/keras_step/__main__.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
from keras import layers

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def same(first: Any, second: Any) -> bool:
    pairs = zip(everything(first), everything(second), strict=True)
    return all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def everything(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def plain(width: int = 64, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), layers.Dense(width, activation="relu"), layers.Dense(2)])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.01), "loss": "mse", **options})
    return model


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        action()
    except kind as found:
        return str(found)
    raise AssertionError(f"no {kind.__name__} was raised")
