"""What is refused, or left to Keras, in words; run by checks.py."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any

from tests.keras_step.kit import check, everything, plain, refusal, same  # isort: skip

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import buoy
from buoy.checkpoint.store import Store
from buoy.keras.step.tape import gradients
from buoy.keras.step.transaction import install
from buoy.microbatch.errors import BadLoss, CannotSplit
from tests.keras_step.gradients import silent
from tests.keras_step.zoo import numbers


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
def a_metric_in_large_units_hides_no_other_gradient() -> None:
    """The loss is a weighted mean, which is no mean over samples; the metric is in dollars."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
    random = np.random.default_rng(0)
    x, price = numbers(32, 4), (3e5 + 1e5 * random.normal(size=(32, 1))).astype("float32")
    weight = random.choice([1.0, 9.0], size=(32, 1)).astype("float32")
    error = keras.metrics.RootMeanSquaredError()

    def loss(batch: Any) -> Any:
        x, price, weight = batch
        made = model(x, training=True)
        error.update_state(price, made * 1e5 + 3e5)
        return ops.sum(weight * ops.square(made - (price - 3e5) / 1e5)) / ops.sum(weight)

    step = gradients(model, loss, micro_batch=8)

    refusal(lambda: step(tuple(map(tf.constant, (x, price, weight)))), CannotSplit)


@check
def a_flag_that_the_loss_function_sets_is_set_by_a_split_step_too() -> None:
    """A boolean variable: it does not subtract."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    begun = keras.Variable(False, dtype="bool", trainable=False)

    def loss(batch: Any) -> Any:
        begun.assign(True)
        return ops.mean(ops.square(model(batch, training=True)))

    gradients(model, loss, micro_batch=8)(tf.constant(numbers(32, 4)))

    assert bool(begun.numpy())


class Tuned(keras.Model):
    """Fine-tuning as Keras's own guide has it: the base is thawed, and keeps the statistics it has."""

    def __init__(self, training: bool | None) -> None:
        super().__init__()
        self.base, self.top = layers.BatchNormalization(name="norm"), layers.Dense(2)
        self.base_training = training

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.top(self.base(x, training=training if self.base_training is None else self.base_training))


@check
def a_base_that_is_called_without_training_is_cut() -> None:
    x, y = numbers(16, 32), numbers(16, 2)
    found = []
    for micro_batch in (None, 5):
        keras.utils.set_random_seed(0)
        model = Tuned(training=False)
        model.compile("sgd", "mse")
        install(model, say=silent, event=silent, micro_batch=micro_batch)
        model.train_on_batch(x, y)
        step = gradients(
            model, lambda b, m=model: ops.mean(ops.square(m(b, training=True))), micro_batch=micro_batch
        )
        found.append([*(v.numpy() for v in model.variables), *(g.numpy() for g in step(x)[1])])
    for whole, parts in zip(*found, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)
    model = Tuned(training=None)
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent, micro_batch=5)
    step = gradients(model, lambda b: ops.mean(ops.square(model(b, training=True))), micro_batch=5)
    for use in (lambda: model.train_on_batch(x, y), lambda: step(x)):
        assert "norm" in refusal(use, CannotSplit)


@check
def losses_that_compare_samples_are_refused() -> None:
    def contrast(y_true: Any, y_pred: Any) -> Any:
        likeness = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        return keras.ops.logsumexp(likeness, axis=1)

    for loss in (contrast, keras.losses.Dice()):
        model = plain(loss=loss)
        install(model, say=silent, event=silent, micro_batch=4)

        assert "would change the gradient" in refusal(
            lambda model=model: model.train_on_batch(numbers(16, 32), np.abs(numbers(16, 2))), CannotSplit
        )


@check
def a_state_from_batch_to_batch_is_refused_and_a_random_crop_is_cut() -> None:
    """The one has a row for each place in the batch; the other has its shape only in training."""
    given = keras.Input((5, 3), batch_size=16)
    model = keras.Model(given, layers.Dense(2)(layers.LSTM(4, stateful=True, name="carries")(given)))
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent)
    model.train_on_batch(numbers(16, 5, 3), numbers(16, 2))
    install(model, say=silent, event=silent, micro_batch=4)

    assert "carries: LSTM(stateful=True)" in refusal(
        lambda: model.train_on_batch(numbers(16, 5, 3), numbers(16, 2)), CannotSplit
    )
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.RandomCrop(4, 4), layers.Flatten(), layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    said: list[str] = []
    install(model, say=said.append, event=silent, micro_batch=4)
    model.train_on_batch(numbers(16, 8, 8, 1), numbers(16, 2))

    assert not said


class FromTheMean(layers.Layer):
    """Compares each sample with the others of its batch."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Neighbours(layers.Layer):
    """Mixes each sample with the one before it, as a recurrent layer does that reads time first."""

    def call(self, x: Any) -> Any:
        return 0.7 * x + 0.3 * tf.roll(x, 1, 0)


@check
def what_depends_on_the_order_of_samples_is_refused() -> None:
    """Another order of the samples gives another gradient there: that is not rounding."""
    model = keras.Sequential([keras.Input((32,)), Neighbours(), layers.Dense(2)])
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent, micro_batch=4)
    first = plain()
    step = gradients(first, lambda x: keras.ops.mean((first(x) - first(x)[:1]) ** 2), micro_batch=4)

    for use in (
        lambda: model.train_on_batch(numbers(16, 32), numbers(16, 2)),
        lambda: step(numbers(16, 32)),
    ):
        assert "would change the gradient" in refusal(use, CannotSplit)


@check
def a_mean_weighted_by_class_is_refused_for_a_rare_class_too() -> None:
    model = keras.Sequential([keras.Input((32,)), layers.Dense(3)])

    def loss(batch: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), from_logits=True)
        weights = tf.gather(tf.constant([1.0, 1.0, 20.0]), batch[1])
        return tf.reduce_sum(each * weights) / tf.reduce_sum(weights)

    common, rare = np.arange(16) % 2, np.arange(16) % 2
    rare[11] = 2
    for batches in ([rare], [common, rare]):  # the second batch that is cut is asked again
        step = gradients(model, loss, micro_batch=4)
        for labels in batches[:-1]:
            step((numbers(16, 32), labels))

        labels = batches[-1]
        message = refusal(lambda step=step, labels=labels: step((numbers(16, 32), labels)), CannotSplit)

        assert "would change the gradient" in message and "(sum, weight)" in message
        assert ("split before it (1)" in message) == (len(batches) > 1), (
            "what was cut before may be wrong too"
        )


@check
def a_rare_mask_is_seen_beside_other_columns() -> None:
    """Whichever of them decides: each array has its turn."""
    model = keras.Sequential([keras.Input((32,)), layers.Dense(1)])
    random = np.random.default_rng(0)
    mask = np.ones(32, "float32")
    mask[21] = 0.0
    batch = {"a mask": mask, **{f"c{n}": random.integers(0, 9, 32) for n in range(5)}, "x": numbers(32, 32)}

    def mean(part: Any) -> Any:
        each = tf.square(model(part["x"])[:, 0] + tf.cast(part["c0"], tf.float32)) * part["a mask"]
        return tf.reduce_sum(each) / tf.reduce_sum(part["a mask"])

    def total(part: Any) -> Any:
        each = tf.square(model(part["x"])[:, 0] + tf.cast(part["c0"], tf.float32)) * part["a mask"]
        return tf.reduce_sum(each), tf.reduce_sum(part["a mask"])

    assert "would change the gradient" in refusal(
        lambda: gradients(model, mean, micro_batch=8)(batch), CannotSplit
    )
    gradients(model, total, micro_batch=8)(batch)


@check
def a_loss_without_reduction_is_refused_and_its_sum_is_split() -> None:
    models = []
    for reduction, micro_batch in ((None, None), (None, 5), ("sum", 5)):
        model = plain(loss=keras.losses.MeanSquaredError(reduction=reduction))
        install(model, say=silent, event=silent, micro_batch=micro_batch)
        step = lambda model=model: model.train_on_batch(numbers(16, 32), numbers(16, 2))  # noqa: E731
        if reduction is None and micro_batch is not None:
            assert "a loss without reduction" in refusal(step, CannotSplit)
        else:
            step()
            models.append(model)
    for whole, parts in zip(*(model.variables for model in models), strict=True):
        np.testing.assert_allclose(parts.numpy(), whole.numpy(), rtol=1e-4, atol=1e-6)


@check
def a_loss_without_weight_is_refused_cut_and_uncut() -> None:
    model = plain()

    def loss(batch: Any) -> Any:
        each = tf.reduce_sum(tf.square(model(batch[0])), axis=1) * batch[1]
        return tf.reduce_sum(each), tf.reduce_sum(batch[1])

    some = np.ones(16, "float32")
    some[:8] = 0  # two parts of four have no weight
    for micro_batch in (None, 4):
        step = gradients(model, loss, micro_batch=micro_batch)
        step((numbers(16, 32), some))
        nothing = (numbers(16, 32), np.zeros(16, "float32"))

        assert "weight of 0 or less" in refusal(lambda step=step, batch=nothing: step(batch), BadLoss)


@check
def near_its_goal_a_training_is_not_refused_and_what_compares_samples_still_is() -> None:
    """The gradient is rounding there, and parts of a batch are rounded otherwise than the whole."""
    x, weights = numbers(64, 32), numbers(32, 1)
    neighbours = 0.7 * x + 0.3 * np.roll(x, 1, 0)
    for inside, seen in (([], x), ([Neighbours()], neighbours)):
        model = keras.Sequential([keras.Input((32,)), *inside, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.layers[-1].set_weights([weights, np.ones(1, "float32")])
        install(model, say=silent, event=silent, micro_batch=16)
        before = [variable.numpy() for variable in model.variables]
        step = lambda model=model, seen=seen: model.train_on_batch(x, seen @ weights + 1)  # noqa: E731

        if inside:
            assert "would change the gradient" in refusal(step, CannotSplit)
        else:
            assert 0 < float(step()) < 1e-9
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True))


@check
def a_mean_over_many_pixels_is_no_reason_to_refuse() -> None:
    """The gradient of the bias before it is a sum of thousands of equal numbers, which rounds to one side."""
    keras.utils.set_random_seed(0)
    inside = [layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((64, 64, 3)), *inside, layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    install(model, say=silent, event=silent, micro_batch=5)
    images, labels = np.abs(numbers(16, 64, 64, 3)) / 4, np.arange(16) % 5
    step = gradients(model, lambda b: loss(b[1], model(b[0])), micro_batch=5)
    for _ in range(2):
        model.train_on_batch(images, labels)
        step((images, labels))


@check
def samples_that_are_all_alike_do_not_hide_what_compares_them() -> None:
    blank_first, tokens = numbers(16, 32), np.ones((16, 4), "int32")
    blank_first[:8] = 0
    model = keras.Sequential([keras.Input((32,)), FromTheMean(), layers.Dense(2)])
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent, micro_batch=4)

    assert "would change the gradient" in refusal(
        lambda: model.train_on_batch(blank_first, numbers(16, 2)), CannotSplit
    )
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(5, 3), layers.Flatten(), layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    install(model, say=silent, event=silent, micro_batch=4)

    assert "samples that are all the same" in refusal(
        lambda: model.train_on_batch(tokens, numbers(16, 2)), CannotSplit
    )
    tokens[9] = 3
    model.train_on_batch(tokens, numbers(16, 2))


@check
def blank_images_at_the_start_of_a_batch_are_no_reason_to_refuse() -> None:
    """Without biases nothing has a gradient there: the probe looks at other samples."""
    blank_first = numbers(16, 8, 8, 1)
    blank_first[:8] = 0
    for x in (np.zeros((16, 8, 8, 1), "float32"), blank_first):
        keras.utils.set_random_seed(0)
        inside = [layers.Conv2D(4, 3, activation="relu", use_bias=False), layers.Flatten()]
        model = keras.Sequential([keras.Input((8, 8, 1)), *inside, layers.Dense(2, use_bias=False)])
        model.compile("sgd", "mse")
        install(model, say=silent, event=silent, micro_batch=4)
        step = lambda model=model, x=x: model.train_on_batch(x, numbers(16, 2))  # noqa: E731
        if x.any():
            step()
        else:
            assert "samples that are all the same" in refusal(step, CannotSplit)


@check
def a_sparse_batch_is_trained_whole_and_refused_in_words_where_it_must_be_cut() -> None:
    given = keras.Input((20,), sparse=True)
    model = keras.Model(given, layers.Dense(1)(given))
    model.compile("sgd", "mse")
    batch = tf.data.Dataset.from_tensors((tf.sparse.from_dense(np.eye(20, dtype="float32")), numbers(20, 1)))
    install(model, say=silent, event=silent)
    model.fit(batch, verbose=0)
    install(model, say=silent, event=silent, micro_batch=4)

    assert "not dense" in refusal(lambda: model.fit(batch, verbose=0), CannotSplit)


@check
def a_loss_that_drops_samples_before_its_mean_is_refused() -> None:
    def kept_only(y_true: Any, y_pred: Any) -> Any:
        return tf.boolean_mask(tf.reduce_sum(tf.square(y_true - y_pred), -1), y_true[:, 0] > 0)

    y = np.abs(numbers(16, 2))  # the five that the probe sees, of 16, are all kept
    y[7:9] *= -1
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

    assert "2 replicas" in refusal(lambda: gradients(mirrored, lambda batch: 0.0), CannotSplit)
    with strategy.scope():  # a model that belongs to nobody yet
        unbuilt = keras.Sequential([layers.Dense(1)])
        assert "2 replicas" in refusal(lambda: gradients(unbuilt, lambda batch: 0.0), CannotSplit)
    assert "compute_loss" in refusal(lambda: install(own, say=silent, event=silent), CannotSplit)
    assert "2 replicas" in refusal(lambda: install(mirrored, say=silent, event=silent), CannotSplit)
    with TemporaryDirectory() as folder:
        asked = [buoy.keras.Guard(folder, micro_batch=4)]
        fit = lambda: mirrored.fit(numbers(8, 32), numbers(8, 2), verbose=0, callbacks=asked)  # noqa: E731
        assert "without `micro_batch=`" in refusal(fit, CannotSplit)
    assert "compile" in refusal(
        lambda: install(keras.Sequential([layers.Dense(1)]), say=silent, event=silent), CannotSplit
    )


@check
def a_guard_over_two_replicas_trains_as_keras_does_saves_and_says_that_it_does_not_split() -> None:
    models, said = [], StringIO()
    for guarded in (False, True):
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = plain(optimizer=keras.optimizers.Adam(0.01), metrics=["mae"])
        with TemporaryDirectory() as folder, redirect_stderr(said):
            callbacks = [buoy.keras.Guard(folder, save=2)] if guarded else []
            model.fit(
                numbers(32, 32), numbers(32, 2), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks
            )
            kept = Store(folder).newest(silent) if guarded else None
        models.append(model)

    assert same(*models)
    assert kept is not None and kept.step == 4, said.getvalue()
    assert "steps are not split" in said.getvalue() and "more than one replica" in said.getvalue()


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
    assert len(said) == 1 and "are off for this model: a layer writes to a weight" in said[0]


@check
def an_error_of_the_users_own_leaves_the_state_as_it_was() -> None:
    seen: list[int] | None = None

    class Fussy(layers.Layer):
        def call(self, x: Any) -> Any:
            if seen is not None:
                seen.append(1)
                if len(seen) == 4:  # of five micro-batches
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
    for _ in range(2):  # after these two, nothing is compared before the third
        model.train_on_batch(numbers(9, 8), numbers(9, 1))
    before = [variable.numpy() for variable in everything(model)]
    seen = []

    message = refusal(lambda: model.train_on_batch(numbers(9, 8), numbers(9, 1)), ValueError)

    assert "a typo of mine" in message
    assert len(seen) == 4 and transaction.steps == 2
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, everything(model), strict=True))
