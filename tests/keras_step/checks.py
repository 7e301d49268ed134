"""What a Keras step under buoy must do, checked in one process: TensorFlow takes seconds to start.

Run with the allocation shim: `python -m tests.keras_step.checks NAME...`, or a JSON name a line on stdin;
each is answered by a line: its trouble, or null.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from tests.keras_step.kit import CHECKS, check, everything, plain, refusal, same  # isort: skip

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from buoy.keras.step.tape import gradients
from buoy.keras.step.transaction import install
from buoy.microbatch.errors import BadLoss, CannotSplit, OutOfMemory
from buoy.testing import shim
from tests.keras_step import kinds as kinds
from tests.keras_step import refusals as refusals
from tests.keras_step.device import Small
from tests.keras_step.gradients import TIMES, double_precision, error, order_error, silent
from tests.keras_step.injection import campaign
from tests.keras_step.zoo import MODELS, classes, numbers

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))


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
    with double_precision():
        for name in ("outputs", "masked", "added", "measured"):
            found = error(MODELS[name], 7, rows=31)

            if name == "added" and VERSION < (3, 14):  # an activity regularizer is a sum there, beside a mean
                assert isinstance(found, str) and "would change the gradient" in found
                continue
            assert not isinstance(found, str), found
            # Older ones add an epsilon of 1e-7 to the number of unmasked values.
            assert max(found) < (1e-7 if name == "masked" and VERSION < (3, 13) else 1e-12), (name, found)


@check
def in_single_precision_it_differs_no_more_than_orders_of_the_samples_do() -> None:
    for name in ("outputs", "measured"):
        found = error(MODELS[name], 7, rows=31)

        assert not isinstance(found, str), found
        assert found[0] <= TIMES * order_error(MODELS[name], rows=31), name


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
    # Activations of 512 samples take 1 MiB each.
    with shim.budget(shim.read().live + 2 * 2**20, smallest=65536):
        model.train_on_batch(x, y)
    stock.train_on_batch(x, y)

    assert transaction.retries >= 1
    assert len(said) == transaction.retries and "retrying the step in micro-batches of" in said[0]
    assert events[0] == {"kind": "batch", "step": 0, "samples": 512}  # told once: it stays as large
    assert events[1]["kind"] == "retry" and events[1]["samples"] == 512
    assert "OOM when allocating tensor" in events[1]["error"]
    assert [event["kind"] for event in events].count("batch") == 1
    assert 1 <= transaction.sizes[-1]["samples"] < 512
    for ours, theirs in zip(model.trainable_variables, stock.trainable_variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-6)

    # From 256 samples it takes 80 steps, from 128 about 110: TensorFlow's first try may have failed once more.
    for _ in range(400):
        model.train_on_batch(x, y)
        if transaction.sizes[-1]["samples"] is None:
            break

    assert transaction.sizes[-1]["samples"] is None, "it is whole again"


@check
def the_first_size_comes_from_measuring_a_few_samples_and_fills_the_device() -> None:
    from buoy.keras.step import train_step  # starts TensorFlow

    x, y = tf.constant(numbers(4096, 32)), tf.constant(numbers(4096, 2))
    for whole in (False, True):
        said: list[str] = []
        model = plain(width=512)
        transaction = install(model, say=said.append, event=silent)
        budget = shim.read().live + (400 if whole else 10) * 2**20
        before, train_step.memory_of = train_step.memory_of, lambda model, size=budget: Small(size)  # type: ignore
        try:
            with shim.budget(budget, smallest=65536):
                model.train_on_batch(x, y)
                shim.reset_peak()
                model.train_on_batch(x, y)
                used, refused = shim.read().peak / budget, shim.read().refused
        finally:
            train_step.memory_of = before

        assert refused == 0 and transaction.retries == 0
        if whole:
            assert not transaction.sizes and not said
        else:
            assert transaction.sizes[0]["step"] == 0 and "using micro-batches of" in said[0], said
            assert 0.8 <= used <= 1.0, (used, transaction.sizes, said)


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

    assert "a single sample does not fit" in message and "weights 70.0 KiB" in message
    assert "dense" in message and "2.0 KiB" in message, message
    assert "`buoy plan`" in message and "SGD" in message
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
    assert "would change the gradient" in refusal(lambda: total(batch), CannotSplit)


def main() -> int:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Keras prints is no answer
    for name in sys.argv[1:] or map(json.loads, sys.stdin):
        try:
            CHECKS[name]()
            result = None
        except Exception:
            result = traceback.format_exc()
        print(json.dumps(result), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
