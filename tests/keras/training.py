"""A Keras training under buoy, of many kinds: `python -m tests.keras.training FOLDER KIND [KILL_AT_STEP]`.

It writes one line per step (a hash of every variable) and the final state to FOLDER.log, and kills itself with
SIGKILL after the given number of steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")

import keras
import numpy
import tensorflow as tf

import buoy

EPOCHS = 3
SAMPLES = 52  # seven batches of 8, the last one of 4
SAVE_EVERY = 3


def arrays() -> tuple[Any, Any]:
    made = numpy.random.default_rng(0)
    return made.normal(size=(SAMPLES, 6, 6, 2)).astype("float32"), made.integers(0, 3, SAMPLES)


class Batches(keras.utils.PyDataset):
    """Augments from the global generators, and shuffles itself at the end of each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = arrays()
        self.order = numpy.arange(SAMPLES)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        import random

        chosen = self.order[index * 8 : index * 8 + 8]
        noise = numpy.random.normal(size=self.x[chosen].shape) * random.random()
        return (self.x[chosen] + noise).astype("float32"), self.y[chosen]

    def on_epoch_end(self) -> None:
        numpy.random.shuffle(self.order)


def generator() -> Any:
    x, y = arrays()
    while True:
        chosen = numpy.random.randint(0, SAMPLES, 8)
        yield (x[chosen] + numpy.random.normal(size=(8, 6, 6, 2))).astype("float32"), y[chosen]


def loader() -> Any:
    import torch

    class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.x, self.y = arrays()

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return self.x[index] + torch.randn(6, 6, 2).numpy(), self.y[index]

    return torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)


def data(kind: str) -> dict[str, Any]:
    """The arguments of `fit` for this kind."""
    x, y = arrays()
    weights = numpy.linspace(0.5, 1.5, SAMPLES)
    slices = tf.data.Dataset.from_tensor_slices((x, y))
    flip = keras.layers.RandomFlip(seed=5)
    drawn = tf.random.Generator.from_seed(3)
    kinds: dict[str, Any] = {
        "arrays": lambda: {
            "x": x,
            "y": y,
            "sample_weight": weights,
            "batch_size": 8,
            "validation_split": 0.2,
        },
        "arrays-batch": lambda: {
            "x": x,
            "y": y,
            "batch_size": 8,
            "shuffle": "batch",
            "class_weight": {0: 2.0},
        },
        "arrays-steps": lambda: {"x": x, "y": y, "batch_size": 8, "steps_per_epoch": 5},
        "pipeline": lambda: {"x": slices.shuffle(20).batch(8).prefetch(2), "validation_data": (x, y)},
        "pipeline-repeat": lambda: {"x": slices.shuffle(20).repeat().batch(8), "steps_per_epoch": 5},
        "pipeline-random": lambda: {
            "x": slices.shuffle(20)
            .map(lambda a, b: (flip(a, training=True), b))
            .map(lambda a, b: (a + drawn.normal([6, 6, 2]) + tf.random.uniform([]), b))
            .batch(8)
            .prefetch(2)
        },
        "pipeline-twice": lambda: {
            "x": slices.shuffle(52)
            .shuffle(20)
            .map(lambda a, b: (a, b), num_parallel_calls=2)
            .repeat(2)
            .batch(16),
            "validation_data": slices.shuffle(52).shuffle(20).batch(8),
        },
        "pipeline-interleaved": lambda: {
            "x": tf.data.Dataset.range(4)
            .shuffle(4)
            .interleave(lambda n: slices.shard(4, n), cycle_length=2, num_parallel_calls=2)
            .shuffle(20)
            .batch(8)
        },
        "pipeline-sampled": lambda: {
            "x": tf.data.Dataset.sample_from_datasets(
                [slices.take(20).shuffle(9).repeat(), slices.skip(20).shuffle(9).repeat()], [0.3, 0.7]
            ).batch(8),
            "steps_per_epoch": 7,
        },
        "pipeline-unknown": lambda: {"x": slices.filter(lambda a, b: b < 3).shuffle(20).batch(8)},
        "pydataset": lambda: {"x": Batches(), "shuffle": True},
        "pydataset-threads": lambda: {"x": Batches(workers=2), "shuffle": False},
        "pydataset-processes": lambda: {"x": Batches(workers=2, use_multiprocessing=True)},
        "shrunk": lambda: {"x": x, "y": y, "batch_size": 8},
        "mixed": lambda: {"x": slices.shuffle(20).batch(8)},
        "mirrored": lambda: {"x": x, "y": y, "batch_size": 8},
        "mirrored-pipeline": lambda: {"x": slices.shuffle(20).batch(8)},
        "loader": lambda: {"x": loader()},
        "generator": lambda: {"x": generator(), "steps_per_epoch": 7},
    }
    return dict(kinds[kind]())


class Greedy(keras.layers.Layer):
    """Asks for more than any machine has when it is given more samples than `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = tf.Variable(1 << 30, trainable=False)

    def call(self, inputs: Any) -> Any:
        wanted = tf.where(tf.shape(inputs)[0] > self.most, 1 << 30, 0)
        with tf.control_dependencies([tf.raw_ops.Empty(shape=[wanted, wanted], dtype=tf.uint8)]):
            return tf.identity(inputs)


class Scarcity(keras.callbacks.Callback):
    """Memory is short from the eighth step on, in the first life of a run: at most four samples fit."""

    def __init__(self, guard: Any) -> None:
        super().__init__()
        self._guard = guard

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._guard.step == 6 and not self._guard.resumed:
            next(layer for layer in self.model.layers if isinstance(layer, Greedy)).most.assign(4)


class Counting(keras.callbacks.Callback):
    """A callback of somebody's own, with a memory of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.seen = 0
        self.recent = numpy.ones(2000)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        self.recent[500 + self.seen] = random.gauss(0, 1) + numpy.random.normal()
        if self.seen % 4 == 0:
            drawn = keras.random.uniform(()) + tf.random.uniform(())
            factor = self.factor + 1e-3 * (float(drawn) + float(self.recent.mean()))
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * factor)


class Log(keras.callbacks.Callback):
    """One line per step; then, once, the death."""

    def __init__(self, path: Path, kill_at: int, how: int) -> None:
        super().__init__()
        self._path, self._kill_at, self._how = path, kill_at, how
        self._steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._steps = state["steps"]

    def write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self.note(self._steps, digest(self.model), logs["loss"], batch)

    def note(self, step: int, state: str, loss: Any, batch: int = 0) -> None:
        self.write(step=step, batch=batch, state=state, loss=float(loss).hex())
        if step == self._kill_at:
            os.kill(os.getpid(), self._how)


def digest(model: Any) -> str:
    """Every variable of the model, its optimizer and its metrics."""
    whole = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        whole.update(variable.numpy().tobytes())
    return whole.hexdigest()[:16]


def build(kind: str) -> Any:
    layers = [
        keras.layers.RandomFlip(),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(3),
    ]
    if kind == "shrunk":  # with batch normalisation it could not be
        layers[2] = Greedy()
    model = keras.Sequential(layers if kind == "pipeline" else [keras.Input((6, 6, 2)), *layers])  # unbuilt
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    many = 2 if kind == "arrays-batch" else 1
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=many, jit_compile=False)
    return model


def main(folder: str, kind: str, kill_at: int = 0, how: int = signal.SIGKILL) -> None:
    """One attempt."""
    tf.config.experimental.enable_op_determinism()
    if kind.startswith("mirrored"):
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    keras.utils.set_random_seed(42)
    if kind == "mixed":
        keras.mixed_precision.set_global_policy("mixed_float16")
    log = Log(Path(f"{folder}.log"), kill_at, how)
    if kind.startswith("loop"):
        own_loop(folder, log, shrunk=kind == "loop-shrunk")
        return
    given = data(kind)
    strategy = (
        tf.distribute.MirroredStrategy() if kind.startswith("mirrored") else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model = build(kind)
    monitor = "val_loss" if "validation_split" in given or "validation_data" in given else "loss"
    counting = Counting(0.97)
    guard = buoy.keras.Guard(folder, save=SAVE_EVERY)
    history = model.fit(
        **given,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            guard,
            keras.callbacks.ReduceLROnPlateau(monitor, factor=0.5, patience=0, min_delta=0.5),
            keras.callbacks.EarlyStopping(monitor, patience=50),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            counting,
            *([Scarcity(guard)] if kind == "shrunk" else []),
            log,
        ],
    )
    log.write(
        final=digest(model),
        history={name: [float(value).hex() for value in values] for name, values in history.history.items()},
        epochs=history.epoch,
        counted=counting.seen,
    )


def own_loop(folder: str, log: Log, shrunk: bool) -> None:
    """A GradientTape loop; or one with micro-batches, in which memory is short from the eighth step on."""
    model = build("shrunk" if shrunk else "loop")
    model.optimizer.build(model.trainable_variables)
    seen = keras.metrics.Mean("seen")
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20).batch(8).prefetch(1)
    loop = buoy.keras.Loop(folder, save=SAVE_EVERY)
    loop.track(model=model, optimizer=model.optimizer, seen=seen)

    @tf.function
    def train(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.update_state(loss)
        return loss

    def loss_of(batch: Any) -> Any:
        return model.loss(batch[1], model(batch[0], training=True))

    step = buoy.keras.gradients(model, loss_of)

    def split(images: Any, labels: Any) -> Any:
        if loop.step == 8 and not loop.resumed:
            model.layers[2].most.assign(4)
        loss, gradients = step((images, labels))
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    if shrunk:
        loop.track(step=step)
        train = split
    model.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for _epoch in loop.epochs(EPOCHS):
        seen.reset_state()
        model.optimizer.learning_rate.assign(model.optimizer.learning_rate * random.uniform(0.5, 0.9))
        noise = numpy.random.normal(scale=0.1)  # not tracked: drawn again as it was
        for images, labels in loop.batches(dataset):
            log.note(loop.step, digest(model), train(images + noise, labels))
    log.write(final=digest(model), seen=float(seen.result()).hex())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
