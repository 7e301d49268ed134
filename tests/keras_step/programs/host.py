"""Trains in a small session with a batch far too large for it: `python host.py plain|guarded FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr
from io import StringIO

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")

import keras
import numpy
from keras import layers

import buoy

KIND, FOLDER, ROWS = sys.argv[1], sys.argv[2], int(sys.argv[3])

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((16,))])
for _ in range(4):
    model.add(layers.Dense(1024, activation="gelu"))
model.add(layers.Dense(1))
model.compile(keras.optimizers.Adam(1e-4), "mse")
drawn = numpy.random.default_rng(0)
x = drawn.normal(size=(3 * ROWS, 16)).astype("float32")
y = x.sum(1, keepdims=True)
guard = buoy.keras.Guard(FOLDER)
with redirect_stderr(StringIO()) as said:
    history = model.fit(
        x,
        y,
        batch_size=ROWS,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[guard] if KIND == "guarded" else [],
    )
losses = [float(value) for value in history.history["loss"]]
print(json.dumps({"losses": losses, "said": said.getvalue()}))
