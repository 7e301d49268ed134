"""A training that goes on while something else has the session's memory: `fit` or `loop`, with batches of any size."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf
from keras import layers

import buoy
from buoy.machine.memory import _reserve, host_memory
from tests.keras.training import digest

STEPS, SAVED = 20, 5
"""A life that is killed has saved this step, and has lost those after it."""


class Lines:
    """A line for each step; then, once, the death."""

    def __init__(self, path: Path, keeper: Any, dies_after: int) -> None:
        self._path, self._keeper, self._dies_after = path, keeper, dies_after

    def note(self, model: Any) -> None:
        step = int(model.optimizer.iterations)
        with self._path.open("a") as file:
            file.write(json.dumps([step, digest(model)]) + "\n")
        if step == self._dies_after:
            self._keeper()._saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def build(samples: int) -> Any:
    wide = 512 if samples > 100 else 16
    kept = [layers.Activation(name) for name in ("sigmoid", "tanh", "softplus")]
    model = keras.Sequential([keras.Input((12,)), layers.Dense(wide), *kept, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def main(how: str, folder: str, samples: int, group: str, memory: str, dies_after: int = 0) -> None:
    """Writes what is left, and steps with their weights, to FOLDER.log (an earlier life's lines are overwritten)."""
    (Path(group) / "tasks").write_text(str(os.getpid()))
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    model = build(samples)
    x = numpy.random.default_rng(0).normal(size=(STEPS * samples, 12)).astype("float32")
    y = x.sum(1, keepdims=True)
    model.predict_on_batch(x[:8])  # TensorFlow's own start is not to fall into the reserve
    log = Path(f"{folder}.log")
    log.write_text("")
    ballast = []
    while memory == "short" and host_memory().free_now():
        # Something else has the memory up to the reserve, which is left alone.
        ballast.append(numpy.ones(host_memory()._group_room(_reserve), "uint8"))
    print(f"left: {host_memory().free_now()}", flush=True)
    train = fit if how == "fit" else loop
    train(folder, log, model, x, y, samples, dies_after)
    del ballast


def fit(folder: str, log: Path, model: Any, x: Any, y: Any, samples: int, dies_after: int) -> None:
    guard = buoy.keras.Guard(folder, save=SAVED)
    lines = Lines(log, lambda: guard._fit._keeper, dies_after)

    class Each(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            lines.note(model)

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    model.fit(x, y, batch_size=samples, shuffle=False, verbose=0, callbacks=[guard, Each()])


def loop(folder: str, log: Path, model: Any, x: Any, y: Any, samples: int, dies_after: int) -> None:
    training = buoy.keras.Loop(folder, save=SAVED)
    lines = Lines(log, lambda: training._keeper, dies_after)
    step = buoy.keras.gradients(model, lambda batch: tf.reduce_mean((model(batch[0]) - batch[1]) ** 2))
    training.track(model=model, optimizer=model.optimizer, step=step)
    for _ in training.epochs(1):
        for batch in training.batches(tf.data.Dataset.from_tensor_slices((x, y)).batch(samples)):
            _, gradients = step(batch)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            lines.note(model)
