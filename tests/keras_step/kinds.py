"""Whole and parts are compared for what is computed, not at a number of the step; run by checks.py."""

from __future__ import annotations

from typing import Any

from tests.keras_step.kit import check, everything, plain, refusal  # isort: skip

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from buoy.keras.step.tape import gradients
from buoy.keras.step.transaction import install
from buoy.microbatch.errors import CannotSplit
from tests.keras_step.gradients import silent
from tests.keras_step.zoo import numbers


def token_mean(tokens: Any, logits: Any) -> Any:
    each = keras.losses.sparse_categorical_crossentropy(tokens, logits, from_logits=True)
    counted = ops.cast(ops.not_equal(tokens, 0), each.dtype)
    return ops.sum(each * counted) / ops.sum(counted)


@check
def padding_that_comes_with_a_later_batch_is_compared_there() -> None:
    full = np.random.default_rng(0).integers(1, 9, (12, 7))
    padded = full.copy()
    padded[[2, 3, 8], 3:] = 0
    model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(9, 4), layers.Dense(9)])
    model.compile("adam", token_mean, run_eagerly=True)  # no seconds of tracing; the other one has a graph
    install(model, say=silent, event=silent, micro_batch=5)
    step = gradients(model, lambda batch: token_mean(batch, model(batch)), micro_batch=5)
    for use in (
        lambda tokens: model.train_on_batch(tokens, tokens),
        lambda tokens: step(tf.constant(tokens)),
    ):
        for _ in range(2):
            use(full)
        before = [variable.numpy() for variable in everything(model)]

        message = refusal(lambda use=use: use(padded), CannotSplit)  # the third one

        assert "would change the gradient" in message and "(sum, weight)" in message
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, everything(model), strict=True))


@check
def a_sum_over_the_number_of_positives_is_no_sum() -> None:
    positive = np.zeros((12, 2), "float32")
    positive[[0, 9]] = 1
    x = numbers(12, 32)

    def normed(y_true: Any, y_pred: Any) -> Any:
        return ops.sum(ops.abs(y_true - y_pred)) / ops.maximum(ops.sum(y_true[:, 0]), 1.0)

    def total(y_true: Any, y_pred: Any) -> Any:
        return ops.sum(ops.abs(y_true - y_pred))

    for loss in (normed, total):
        model = plain(loss=loss, run_eagerly=True)
        install(model, say=silent, event=silent, micro_batch=5)
        fit = lambda model=model: model.train_on_batch(x, positive)  # noqa: E731
        own = gradients(
            model, lambda batch, f=loss, m=model: f(batch[1], m(batch[0])), reduction="sum", micro_batch=5
        )
        for use in (fit, lambda own=own: own((x, positive))):
            if loss is total:
                use()
            else:
                assert "number of tokens or of positives" in refusal(use, CannotSplit)


class Sometimes(layers.Layer):
    """Mixes neighbours where a draw falls on one side."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self._draw, self.seeds = draw, keras.random.SeedGenerator(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self._draw(x, self.seeds) if training else x


def mixed(x: Any, whether: Any) -> Any:
    return ops.where(whether, 0.7 * x + 0.3 * ops.roll(x, 1, 0), x)


MIXING = {
    "half": lambda x, seeds: mixed(x, keras.random.uniform((), seed=seeds) < 0.5),
    "mostly": lambda x, seeds: mixed(x, keras.random.uniform((), seed=seeds) > 0.9),
    "normal": lambda x, seeds: mixed(x, keras.random.normal((), seed=seeds) < 0),
    "of TensorFlow": lambda x, seeds: mixed(x, tf.random.uniform(()) > 0.5),
    "whole number": lambda x, seeds: mixed(x, keras.random.randint((), 0, 2, seed=seeds) == 1),
    "shuffled": lambda x, seeds: 0.5 * x + 0.5 * keras.random.shuffle(x, seed=seeds),
    "sorted": lambda x, seeds: (
        0.5 * x + 0.5 * ops.take(x, ops.argsort(keras.random.uniform((ops.shape(x)[0],), seed=seeds)), 0)
    ),
}
BY_ITSELF = {
    "coin per sample": lambda x, seeds: (
        x * ops.where(keras.random.uniform((ops.shape(x)[0], 1), seed=seeds) < 0.5, 0.5, 2)
    ),
    "mask of one's own": lambda x, seeds: (
        x * ops.cast(keras.random.uniform(ops.shape(x), seed=seeds) > 0.3, x.dtype)
    ),
    "steps of diffusion": lambda x, seeds: (
        x + ops.cast(keras.random.randint((ops.shape(x)[0], 1), 0, 1000, seed=seeds), x.dtype) / 1000
    ),
    "of TensorFlow": lambda x, seeds: (
        x
        * tf.cast(tf.random.uniform((tf.shape(x)[0], 1), 1, 10, tf.int32), x.dtype)
        / tf.random.normal(tf.shape(x), 3.0, 0.1)
    ),
}
REFUSED = {
    "keras.random.categorical": lambda x, seeds: (
        x * ops.cast(1 + keras.random.categorical(x[:, :3], 1, seed=seeds), x.dtype)
    ),
    "keras.random.beta": lambda x, seeds: mixed(x, keras.random.beta((), 0.1, 0.9, seed=seeds) > 0.9),
    "tf.random.gamma": lambda x, seeds: x * tf.random.gamma([], 1.0),
}


@check
def both_sides_of_a_draw_are_looked_at() -> None:
    for name, draw in MIXING.items():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Sometimes(draw), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=name != "mostly")
        install(model, say=silent, event=silent, micro_batch=5)
        step = lambda model=model: model.train_on_batch(numbers(12, 4), numbers(12, 1))  # noqa: E731

        assert "mixes them" in refusal(step, CannotSplit), name


@check
def draws_alone_are_no_reason_to_refuse() -> None:
    drawing = [part for draw in BY_ITSELF.values() for part in (layers.Dense(4), Sometimes(draw))]
    model = keras.Sequential([keras.Input((4,)), *drawing, layers.Dense(1)])
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent, micro_batch=5)

    model.train_on_batch(numbers(12, 4), numbers(12, 1))


@check
def draws_without_two_sides_are_refused_by_name() -> None:
    for name, draw in REFUSED.items():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Sometimes(draw), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        install(model, say=silent, event=silent, micro_batch=5)

        message = refusal(
            lambda model=model: model.train_on_batch(numbers(12, 4), numbers(12, 1)), CannotSplit
        )

        assert f"the model draws with {name}" in message, message


class Taught(keras.Model):
    """A student with a teacher that follows it, or a counter of steps, moved inside the loss."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.student, self.teacher = layers.Dense(2), layers.Dense(2, trainable=False)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.counts = counts

    def call(self, x: Any) -> Any:
        return self.student(x), self.teacher(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        ours, theirs = y_pred
        if self.counts:
            self.steps.assign_add(1.0)
        else:
            for old, new in zip(self.teacher.weights, self.student.weights, strict=True):
                old.assign(0.9 * old + 0.1 * new)
        return ops.mean(ops.square(ours - y)) + ops.mean(ops.square(ours - ops.stop_gradient(theirs)))


@check
def what_the_forward_pass_moves_is_refused_by_name_and_trains_whole() -> None:
    x, y = numbers(12, 4), numbers(12, 2)
    for counts in (True, False):
        model = Taught(counts)
        model.compile("sgd", run_eagerly=True)
        install(model, say=silent, event=silent)
        model.train_on_batch(x, y)
        install(model, say=silent, event=silent, micro_batch=5)
        step = gradients(model, lambda b, m=model: m.compute_loss(b[0], b[1], m(b[0])), micro_batch=5)
        before = [variable.numpy() for variable in model.variables]

        for use in (lambda model=model: model.train_on_batch(x, y), lambda step=step: step((x, y))):
            message = refusal(use, CannotSplit)
            assert "the forward pass writes a variable" in message
            assert ("steps" in message) == counts, message
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True))


@check
def a_metric_that_a_loss_function_updates_is_split_if_it_adds_up_and_else_refused_by_name() -> None:
    x, y = numbers(12, 32), np.arange(12) % 2
    model = plain()
    correct, mean = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean(name="mean_loss")

    def loss(batch: Any, metric: Any) -> Any:
        found = model(batch[0])
        value = ops.mean(keras.losses.sparse_categorical_crossentropy(batch[1], found, from_logits=True))
        metric.update_state(*((batch[1], found) if metric is correct else (value,)))
        return value

    results = []
    for micro_batch in (None, 5):
        correct.reset_state()
        step = gradients(model, lambda batch: loss(batch, correct), micro_batch=micro_batch)
        for _ in range(3):
            step((x, y))
        results.append((float(correct.count.numpy()), float(correct.result())))
    assert results[0] == results[1] and results[0][0] == 36

    step = gradients(model, lambda batch: loss(batch, mean), micro_batch=5)
    assert "mean_loss/total" in refusal(lambda: step((x, y)), CannotSplit)
    assert not mean.count.numpy()


@check
def a_variable_that_is_not_keras_own_is_refused_before_anything_moves_it() -> None:
    moved = tf.Variable(0.0)

    def moving(y_true: Any, y_pred: Any) -> Any:
        moved.assign_add(1.0)
        return ops.mean(ops.square(y_true - y_pred), axis=-1)

    model = plain(loss=moving)
    install(model, say=silent, event=silent, micro_batch=5)
    step = gradients(model, lambda x: ops.mean(moving(0.0, model(x))), micro_batch=5)

    for use in (
        lambda: model.train_on_batch(numbers(12, 32), numbers(12, 2)),
        lambda: step(numbers(12, 32)),
    ):
        assert "not Keras's" in refusal(use, CannotSplit)
        assert moved.numpy() == 0


@check
def the_hardest_samples_of_a_batch_are_seen_with_as_many_as_are_computed_at_once() -> None:
    """Five samples cannot show it; the second cut step is compared with a whole micro-batch."""

    def hardest(y_true: Any, y_pred: Any) -> Any:
        each = ops.sum(ops.square(y_true - y_pred), axis=-1)
        return ops.mean(tf.math.top_k(each, tf.minimum(8, tf.shape(each)[0])).values)

    model = plain(loss=hardest, run_eagerly=True)
    install(model, say=silent, event=silent, micro_batch=16)
    step = lambda: model.train_on_batch(numbers(32, 32), numbers(32, 2))  # noqa: E731
    step()

    assert "would change the gradient" in refusal(step, CannotSplit)


@check
def a_loop_of_ones_own_follows_what_is_thawed() -> None:
    model = plain()
    model.layers[0].trainable = False
    step = gradients(model, lambda x: ops.mean(ops.square(model(x))), micro_batch=5)
    step(numbers(12, 32))
    model.layers[0].trainable = True

    _, found = step(numbers(12, 32))

    assert [tuple(g.shape) for g in found] == [tuple(v.shape) for v in model.trainable_variables]


@check
def methods_given_to_one_model_alone_are_its_own() -> None:
    x, y = numbers(8, 32), numbers(8, 2)

    def trained(micro_batch: int | None) -> tuple[Any, Any]:
        model = plain(loss="mse", metrics=["mae"])
        theirs, measured = model.compute_loss, model.compute_metrics

        def own_loss(x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
            return theirs(x, y, y_pred, sample_weight) + ops.mean(ops.square(y_pred))

        def own_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return {**measured(x, y, y_pred, sample_weight), "least": ops.min(y_pred)}

        model.compute_loss, model.compute_metrics = own_loss, own_metrics
        install(model, say=silent, event=silent, micro_batch=micro_batch)
        logs = model.train_on_batch(x, y, return_dict=True)
        return logs, [variable.numpy() for variable in model.variables]

    (logs, whole), (same, parts) = trained(None), trained(3)

    assert logs.keys() == same.keys() and np.isclose(logs["least"], same["least"])
    assert all(np.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(whole, parts, strict=True))
