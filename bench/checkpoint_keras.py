"""The child of `bench checkpoint` that saves a Keras model; prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}

import keras
import tensorflow as tf

from buoy.checkpoint.encoding import Tensor
from buoy.checkpoint.store import Store


def as_tensor(value: object) -> Tensor | None:
    if not isinstance(value, keras.Variable):
        return None

    def copy_into(room: memoryview) -> None:
        room[:] = memoryview(value.numpy().reshape(-1).view("uint8"))

    words = {"float32": "F32", "int32": "I32", "int64": "I64"}
    return Tensor(words[value.dtype], tuple(value.shape), copy_into, id(value))


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    width = int(os.environ.get("BENCH_KERAS_WIDTH", "2048"))
    model = keras.Sequential([keras.Input((width,)), *[keras.layers.Dense(width) for _ in range(4)]])
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    variables = {variable.path: variable for variable in [*model.variables, *model.optimizer.variables]}
    store = Store(folder / "keras")
    saver = store.saver(print, lambda kind, **values: None)
    saver.size({"variables": variables}, as_tensor)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def ours() -> None:
        saver.save({"variables": variables}, {"step": 1}, as_tensor)

    methods: dict[str, Any] = {
        "buoy": ours,
        "Keras model.save": lambda: model.save(folder / "model.keras"),
        "Keras save_weights": lambda: model.save_weights(folder / "model.weights.h5"),
        "tf.train.Checkpoint": lambda: checkpoint.write(str(folder / "tf")),
    }
    found: dict[str, list[float]] = {name: [] for name in methods}
    durable = []
    for turn in range(rounds + 1):
        for name, save in methods.items():
            started = time.perf_counter()
            save()
            stall = time.perf_counter() - started
            if name == "buoy":
                saver.wait()
                durable.append(time.perf_counter() - started)
            if turn:
                found[name].append(stall)
    size = sum(int(tf.size(variable.value)) * 4 for variable in variables.values())
    saver.close()
    print(json.dumps({"bytes": size, "stall": found, "durable": durable[1:]}))


if __name__ == "__main__":
    main()
