"""The micro-batch that buoy finds for a Keras model, over the largest that fits; TensorFlow's real allocator decides.

Asked: 0.95 to 1.00 with no out-of-memory, in at least 9 of 10 models.

Each model gets a budget of bytes, kept by the allocation shim (buoy.testing.shim): an allocation that would cross it
is refused, as a full device would refuse it. The largest micro-batch is found by bisection over steps of two parts.
Only the answer to "how much is free" is a stand-in: a GPU tells it itself, here it is the budget less what is held.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.measure import table
from buoy.testing import shim
from tests.keras_step.device import Small

ELEMENTS = 8192 * 256
"""Of a batch: enough samples for a budget beside which TensorFlow's own graphs, some 5 MB, are small."""
LOWEST, ENOUGH = 0.95, 9
_SMALLEST = 65536  # bytes; what is smaller is TensorFlow's own housekeeping


def main() -> dict[str, object]:
    """Each model in a process of its own: what one leaves in TensorFlow's pools is free to the next."""
    rows, good = [], 0
    for name in MODELS:
        command = [sys.executable, "-m", "bench.keras_sizes", name]
        done = subprocess.run(
            command, env=shim.environment(), capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        found = json.loads(done.stdout.splitlines()[-1])
        share = found["found"] / found["largest"]
        ok = LOWEST <= share <= 1.0 and not found["retries"]
        good += ok
        rows.append(
            [name, found["largest"], found["found"], f"{share:.3f}", found["retries"], "" if ok else "no"]
        )
    print(table(["model", "largest that fits", "found", "share", "out of memory", ""], rows))
    print(f"{good} of {len(rows)}")
    return {"rows": rows, "good": good, "met": good >= ENOUGH}


def _mlp(*widths: int, **options: Any) -> Any:
    from keras import Input, Sequential, layers

    return Sequential(
        [Input((64,)), *(layers.Dense(w, activation="gelu", **options) for w in widths), layers.Dense(8)]
    )


def _between(*inside: str) -> Any:
    from keras import Input, Sequential, layers

    made = {"dropout": lambda: layers.Dropout(0.2), "norm": lambda: layers.LayerNormalization()}
    return Sequential([Input((64,)), layers.Dense(2048), *(made[name]() for name in inside),
                       layers.Activation("gelu"), layers.Dense(8)])  # fmt: skip


def _convolutions(norm: bool) -> Any:
    from keras import Input, Sequential, layers

    between = [layers.GroupNormalization(4), layers.MaxPooling2D()] if norm else []
    return Sequential([Input((32, 32, 3)), layers.Conv2D(16, 3, activation="relu"), *between,
                       layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D(),
                       layers.Dense(8)])  # fmt: skip


def _attention(width: int, heads: int) -> Any:
    from keras import Input, Model, layers

    inputs = Input((32, width))
    x = layers.LayerNormalization()(
        inputs + layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(inputs, inputs)
    )
    x = layers.LayerNormalization()(x + layers.Dense(width)(layers.Dense(2 * width, activation="gelu")(x)))
    return Model(inputs, layers.Dense(8)(layers.GlobalAveragePooling1D()(x)))


def _sound() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((256, 4)), layers.Conv1D(32, 5, activation="gelu"), layers.Conv1D(32, 5),
                       layers.Flatten(), layers.Dense(8)])  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: _mlp(2048),
    "deep mlp": lambda: _mlp(*[256] * 6),
    "wide mlp": lambda: _mlp(8192),
    "dropout": lambda: _between("dropout"),
    "layer norm": lambda: _between("norm"),
    "convolution": lambda: _convolutions(norm=False),
    "pooled convolution": lambda: _convolutions(norm=True),
    "attention": lambda: _attention(32, 2),
    "attention, wider": lambda: _attention(64, 4),
    "sound": _sound,
}


def _measure(name: str) -> dict[str, int]:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0")
    os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")
    import keras
    import numpy as np
    import tensorflow as tf

    from buoy.keras.step import functions
    from buoy.keras.step.transaction import install
    from buoy.microbatch.errors import is_oom

    def build() -> Any:
        keras.utils.set_random_seed(0)
        model = MODELS[name]()
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        return model

    first = build()
    generator = np.random.default_rng(0)
    rows = min(32768, max(8192, ELEMENTS // math.prod(first.input_shape[1:])))
    x = tf.constant(generator.normal(size=(rows, *first.input_shape[1:])).astype("f4"))
    y = tf.constant(generator.normal(size=(rows, 8)).astype("f4"))

    def in_two(step: functions.Functions, size: int) -> None:
        for _ in range(2):
            step.run((x[: 2 * size], y[: 2 * size]), 2, reserve=True)

    step = functions.Functions(first, ())
    in_two(step, rows // 8)  # the graph, and all that is made once
    held = shim.read().live
    shim.reset_peak()
    in_two(step, rows // 5)
    room = shim.read().peak - held  # about a fifth of the batch fits

    model, sized = build(), []
    transaction = install(
        model, say=lambda text: None,
        event=lambda kind, **values: sized.append(values["samples"]) if kind == "sized" else None,
    )  # fmt: skip
    model.optimizer.build(model.trainable_variables)
    budget = shim.read().live + room
    vars(functions)["memory_of"] = lambda model: Small(budget)
    with shim.budget(budget, smallest=_SMALLEST):
        for _ in range(3):
            room = budget - shim.read().live  # at the start of a step, with all graphs there
            model.train_on_batch(x, y)
    guarded = transaction._functions
    assert guarded is not None

    def fits(size: int) -> bool:
        try:
            parts = x[: 2 * size], y[: 2 * size]
            with shim.budget(shim.read().live + room, smallest=_SMALLEST):
                for _ in range(2):
                    guarded.run(parts, 2, reserve=True)
            return True
        except tf.errors.OpError as error:
            if not is_oom(error):
                raise
            guarded.reached()
            return False

    found = sized[-1] if sized else rows
    low, high = int(found * 0.8), min(rows // 2, int(found * 1.2))  # most likely; else all sizes
    if not fits(low):
        low, high = 1, low - 1
    elif fits(high):
        low, high = high, rows // 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return {"largest": low, "found": found, "retries": transaction.retries, "room": room}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
