"""What a Keras step under buoy must do, checked in one process: TensorFlow takes seconds to start.

Run with the allocation shim: `python -m tests.keras_step.checks`; prints a JSON object of name -> trouble or null.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["TF_NUM_INTEROP_THREADS"] = "1"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # see tests/keras_step/__main__.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from buoy.keras.tape import gradients
from buoy.keras.transaction import install
from buoy.microbatch.errors import BadLoss, CannotSplit, OutOfMemory
from buoy.testing import shim
from tests.keras_step.gradients import error, silent
from tests.keras_step.injection import campaign
from tests.keras_step.zoo import MODELS, classes, numbers

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


@check
def without_oom_fit_is_keras_own_bit_for_bit() -> None:
    def trained(guarded: bool) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((32,)),
                layers.Dense(32, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.AdamW(1e-2, clipnorm=1.0, use_ema=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        if guarded:
            install(model, say=silent, event=silent)
        history = model.fit(
            numbers(50, 32), classes(50, top=3), batch_size=16, epochs=2, verbose=0, validation_split=0.2,
            class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        )  # fmt: skip
        return model, history.history

    stock, stock_history = trained(False)
    guarded, history = trained(True)

    assert same(stock, guarded)
    assert history == stock_history


@check
def several_steps_per_execution_are_keras_own_bit_for_bit() -> None:
    ends: list[int] = []
    models = []
    for guarded in (False, True):
        model = plain(steps_per_execution=3)
        if guarded:
            install(model, say=silent, event=silent)
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(int(batch)))
        model.fit(numbers(80, 32), numbers(80, 2), batch_size=16, epochs=1, verbose=0, callbacks=[count])
        models.append(model)

    assert same(*models)
    assert ends[: len(ends) // 2] == ends[len(ends) // 2 :]


@check
def every_refused_allocation_is_recovered_bit_for_bit() -> None:
    for name in ("mlp", "half"):
        outcome = campaign(name, MODELS[name], careful=True, smallest=1024, every=5)

        assert outcome.exact, str(outcome)


@check
def batch_sized_allocations_are_recovered_without_copies() -> None:
    outcome = campaign("cnn", MODELS["cnn"], careful=False, smallest=16384, every=3)

    assert outcome.exact, str(outcome)


@check
def an_update_that_fails_half_way_is_never_silent() -> None:
    """Without copies only a lie of the allocator gets there: the reserve was granted, its parts are not."""
    outcome = campaign("average", MODELS["average"], careful=False, smallest=1024)

    assert outcome.results["DIFFERENT"] == 0, str(outcome)
    assert any(word.startswith("TornStep") for word in outcome.results), str(outcome)


@check
def the_gradient_is_that_of_the_whole_batch() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        for name in ("outputs", "masked", "added", "unreduced"):
            found = error(MODELS[name], 7, rows=31)

            assert not isinstance(found, str), found
            assert max(found) < 1e-12, (name, found)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@check
def a_batch_that_does_not_fit_is_split_and_grows_back() -> None:
    said: list[str] = []
    events: list[dict[str, Any]] = []
    model = plain(width=512)
    transaction = install(
        model, say=said.append, event=lambda kind, **values: events.append({"kind": kind, **values})
    )
    stock = plain(width=512)
    x, y = numbers(512, 32), numbers(512, 2)
    for one in (stock, model):
        one.train_on_batch(x, y)
    shim.reset_peak()
    with shim.budget(
        shim.read().live + 2 * 2**20, smallest=65536
    ):  # activations of 512 samples take 1 MiB each
        model.train_on_batch(x, y)
    stock.train_on_batch(x, y)

    assert transaction.retries >= 1
    assert len(said) == transaction.retries and "the batch stays 512" in said[0]
    assert events[0]["kind"] == "retry" and events[0]["samples"] == 512
    assert "OOM when allocating tensor" in events[0]["error"]
    assert 1 <= transaction.sizes[-1]["samples"] < 512
    for ours, theirs in zip(model.trainable_variables, stock.trainable_variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-6)

    for _ in range(80):
        model.train_on_batch(x, y)

    assert transaction.sizes[-1]["samples"] is None, "it is whole again"


@check
def a_single_sample_that_does_not_fit_is_told_in_words() -> None:
    model = plain(width=512)
    install(model, say=silent, event=silent)
    x, y = tf.constant(numbers(8, 32)), tf.constant(numbers(8, 2))
    model.train_on_batch(x, y)
    install(model, say=silent, event=silent, micro_batch=4)
    model.train_on_batch(x, y)
    before = [variable.numpy() for variable in everything(model)]

    def starved() -> None:
        with shim.failing(1, times=1 << 40, smallest=2048):
            model.train_on_batch(x, y)

    message = refusal(starved, OutOfMemory)

    assert "a single sample does not fit" in message and "weights 69.0 KiB" in message
    assert "dense" in message and "2.0 KiB" in message, message
    assert "`buoy plan`" in message and "SGD" in message
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, everything(model), strict=True))


@check
def batch_norm_is_refused_only_when_it_must_be_split() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), layers.BatchNormalization(name="norm"), layers.Dense(2)])
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent)
    model.train_on_batch(numbers(16, 32), numbers(16, 2))
    transaction = install(model, say=silent, event=silent, micro_batch=4)

    message = refusal(lambda: model.train_on_batch(numbers(16, 32), numbers(16, 2)), CannotSplit)

    assert "norm" in message and 'inexact=("batchnorm",)' in message
    transaction.remove()
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent, micro_batch=4)
    model.train_on_batch(numbers(16, 32), numbers(16, 2))


@check
def losses_that_compare_samples_are_refused() -> None:
    def contrast(y_true: Any, y_pred: Any) -> Any:
        likeness = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        return keras.ops.logsumexp(likeness, axis=1)

    for loss in (contrast, keras.losses.Dice()):
        model = plain(loss=loss)
        install(model, say=silent, event=silent, micro_batch=4)

        assert "another gradient" in refusal(
            lambda model=model: model.train_on_batch(numbers(16, 32), np.abs(numbers(16, 2))), CannotSplit
        )


@check
def a_loss_that_drops_samples_before_its_mean_is_refused() -> None:
    def kept_only(y_true: Any, y_pred: Any) -> Any:
        return tf.boolean_mask(tf.reduce_sum(tf.square(y_true - y_pred), -1), y_true[:, 0] > 0)

    y = np.abs(numbers(16, 2))  # the first five, which the probe sees, are all kept
    y[6:8] *= -1
    model = plain(loss=kept_only)
    install(model, say=silent, event=silent, micro_batch=4)
    before = [variable.numpy() for variable in everything(model)]

    message = refusal(lambda: model.train_on_batch(numbers(16, 32), y), CannotSplit)

    assert "same number of values" in message
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, everything(model), strict=True))


@check
def what_cannot_be_made_atomic_is_refused_at_the_start() -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    own = Own([layers.Dense(1)])
    own.compile("sgd", "mse")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        mirrored = plain()

    assert "compute_loss" in refusal(lambda: install(own, say=silent, event=silent), CannotSplit)
    assert "2 replicas" in refusal(lambda: install(mirrored, say=silent, event=silent), CannotSplit)
    assert "compile" in refusal(
        lambda: install(keras.Sequential([layers.Dense(1)]), say=silent, event=silent), CannotSplit
    )


@check
def a_layer_that_writes_its_own_weights_trains_as_keras_does() -> None:
    said: list[str] = []
    models = []
    for guarded in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((8,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if guarded:
            install(model, say=said.append, event=silent)
        model.fit(numbers(32, 8), numbers(32, 1), batch_size=8, verbose=0, shuffle=False)
        models.append(model)

    assert same(*models)
    assert len(said) == 1 and "are off for this model" in said[0]


@check
def an_error_of_the_users_own_leaves_the_state_as_it_was() -> None:
    seen: list[int] = []

    class Fussy(layers.Layer):
        def call(self, x: Any) -> Any:
            seen.append(1)
            if len(seen) == 8:  # in a later micro-batch
                raise ValueError("a typo of mine")
            return x

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8), layers.Dropout(0.5), Fussy(), layers.Dense(1)]
    )
    model.compile("adam", "mse", run_eagerly=True)
    install(model, say=silent, event=silent)
    model.train_on_batch(numbers(9, 8), numbers(9, 1))
    transaction = install(model, say=silent, event=silent, micro_batch=2)
    before = [variable.numpy() for variable in everything(model)]
    seen.clear()

    message = refusal(lambda: model.train_on_batch(numbers(9, 8), numbers(9, 1)), ValueError)

    assert "a typo of mine" in message
    assert transaction.steps == 0
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, everything(model), strict=True))


@check
def sizes_are_kept_and_replayed() -> None:
    x, y = numbers(20, 32), numbers(20, 2)
    first = plain()
    transaction = install(first, say=silent, event=silent)
    first.train_on_batch(x, y)
    sizer = transaction.state_dict()["sizer"]
    transaction.replay(
        [{"step": 1, "samples": 5, "sizer": sizer}, {"step": 3, "samples": None, "sizer": sizer}]
    )
    used = []
    for _ in range(3):
        first.train_on_batch(x, y)
        used.append(transaction.state_dict()["history"]["samples"])
    again = plain()
    resumed = install(again, say=silent, event=silent)
    resumed.load_state_dict(json.loads(json.dumps(transaction.state_dict())))

    assert used == [5, 5, None]
    assert resumed.state_dict() == transaction.state_dict() and resumed.steps == 4


@check
def the_model_gets_its_own_step_back() -> None:
    model = plain()
    install(model, say=silent, event=silent, micro_batch=4).remove()
    stock = plain()
    for one in (model, stock):
        one.train_on_batch(numbers(16, 32), numbers(16, 2))

    assert same(model, stock)
    assert model.make_train_function.__self__ is model


@check
def a_loop_of_ones_own_gets_the_whole_batchs_gradient() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(256, activation="relu"), layers.Dense(2)])
    batch = (numbers(300, 16), numbers(300, 2))

    def loss(part: Any) -> Any:
        return keras.ops.mean(keras.ops.square(model(part[0], training=True) - part[1]))

    def tokens(part: Any) -> Any:
        weight = keras.ops.square(part[1])
        return keras.ops.sum(weight * keras.ops.square(model(part[0]) - part[1])), keras.ops.sum(weight)

    for function in (loss, tokens):
        whole, expected = gradients(model, function)(batch)
        split = gradients(model, function, micro_batch=77)
        split(batch)
        with shim.failing(3, smallest=65536):
            value, found = split(batch)
            refused = shim.read().refused

        assert refused == 1
        np.testing.assert_allclose(value, whole, rtol=1e-6)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)

    vector = gradients(model, lambda part: keras.ops.square(model(part[0]) - part[1]))
    assert "scalar" in refusal(lambda: vector(batch), BadLoss)
    total = gradients(model, lambda part: keras.ops.sum(model(part[0])), micro_batch=77)  # called a mean
    assert "another gradient" in refusal(lambda: total(batch), CannotSplit)


def main() -> int:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    chosen = sys.argv[1:] or list(CHECKS)
    results: dict[str, str | None] = {}
    for name in chosen:
        print(name, file=sys.stderr, flush=True)  # the last one, should TensorFlow take the process with it
        try:
            CHECKS[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
