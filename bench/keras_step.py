"""What an atomic step costs Keras's `fit` when nothing runs out of memory, per step.

Asked: 95 % upper bound at most 1.02 of Keras's own step, same micro-batch (the whole batch).

Keras's own training function and buoy's run the same model on the same batch in short windows, next to each other and
in random order. "control" is Keras against a second copy of itself: what noise alone makes of such a ratio.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from bench.measure import interval, table

PAIRS = int(os.environ.get("BENCH_ROUNDS", "120"))
BOUND = 1.02

_PROGRAM = r"""
import json, os, random, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import keras, numpy as np, tensorflow as tf
from keras import layers
from buoy.keras.step.transaction import install

def silent(*args, **values): pass

def convolutions():
    inputs = x = keras.Input((32, 32, 3))
    for filters in (32, 64, 64):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", strides=2)(x)))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    return model, keras.optimizers.SGD(0.1, momentum=0.9), np.random.normal(size=(64, 32, 32, 3)).astype("f4")

def perceptron():
    model = keras.Sequential([keras.Input((256,))])
    for _ in range(4):
        for layer in (layers.Dense(512), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.1)):
            model.add(layer)
    model.add(layers.Dense(10))
    return model, keras.optimizers.Adam(1e-3), np.random.normal(size=(128, 256)).astype("f4")

def attention():
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32, dropout=0.1)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(128)(layers.Dense(512, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return model, keras.optimizers.AdamW(1e-3), np.random.randint(0, 1000, (32, 64))

def trainer(build, guarded):
    keras.utils.set_random_seed(0)
    model, optimizer, x = build()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    if guarded:
        install(model, say=print, event=silent)
    y = np.random.randint(0, 10, len(x))
    iterator = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    model.make_train_function()
    step = model.train_function
    for _ in range(10):
        step(iterator)
    def window(steps):
        start = time.perf_counter()
        for _ in range(steps):
            logs = step(iterator)
        float(logs["loss"])
        return (time.perf_counter() - start) / steps
    return window

results = {}
chance = random.Random(0)
for build in (convolutions, perceptron, attention):
    ways = {"keras": trainer(build, False), "control": trainer(build, False), "buoy": trainer(build, True)}
    steps = max(2, int(0.15 / ways["keras"](5)))
    ratios = {"control": [], "buoy": []}
    for _ in range(int(sys.argv[1])):
        order = list(ways)
        chance.shuffle(order)
        seconds = {way: ways[way](steps) for way in order}
        for way in ratios:
            ratios[way].append(seconds[way] / seconds["keras"])
    results[build.__name__] = {"ms": 1e3 * seconds["keras"], **ratios}
print(json.dumps(results))
"""


def main() -> dict[str, object]:
    command = [sys.executable, "-c", _PROGRAM, str(PAIRS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    measured = json.loads(done.stdout.splitlines()[-1])
    rows, upper = [], {}
    for name, found in measured.items():
        control, _, control_upper = interval(found["control"], level=0.90)  # one-sided 95 %
        median, _, upper[name] = interval(found["buoy"], level=0.90)
        rows.append([name, f"{found['ms']:.2f} ms", f"{median:.3f}", f"{upper[name]:.3f}",
                     f"{control:.3f} / {control_upper:.3f}"])  # fmt: skip
    print(table(["model", "Keras's step", "buoy over Keras", "95 % upper", "control"], rows))
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    return {"upper": upper, "rows": rows, "met": all(value <= BOUND for value in upper.values())}
