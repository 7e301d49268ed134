"""A training whose batch is far too large for its session: `plain`, `guarded`, or with a cap of its own."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import keras
import numpy
from keras import layers

import buoy

ROWS = 24000


def main(kind: str, folder: str, group: str | None = None) -> None:
    """Writes losses and what was said to FOLDER.json."""
    if group is not None:
        (Path(group) / "tasks").write_text(str(os.getpid()))
    keras.utils.set_random_seed(0)
    wide = [
        layers.Activation(name) for name in ("tanh", "sigmoid", "softplus", "tanh", "sigmoid", "softplus")
    ]
    model = keras.Sequential([keras.Input((16,)), layers.Dense(512), *wide, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    rows = 1000 if kind == "capped" else ROWS
    x = numpy.random.default_rng(0).normal(size=(2 * rows, 16)).astype("float32")
    y = x.sum(1, keepdims=True)
    answer: dict[str, Any] = {}
    callbacks: list[Any] = []
    if kind != "plain":
        callbacks.append(buoy.keras.Guard(folder, memory_cap="1GB" if kind == "capped" else None))
    with redirect_stderr(StringIO()) as said:
        history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=callbacks)
    if kind == "capped":
        try:
            numpy.empty(1 << 30, "uint8")
        except MemoryError as error:
            answer["raised"] = str(error)
    answer |= {"losses": [float(value) for value in history.history["loss"]], "said": said.getvalue()}
    Path(f"{folder}.json").write_text(json.dumps(answer))
