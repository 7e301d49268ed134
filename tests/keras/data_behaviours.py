"""Data that keeps a state of its own, under a guard; each function is one behaviour, run in a process of its own."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import keras
import numpy
import tensorflow as tf

import buoy
from buoy.keras import guarded_fit
from tests.keras.behaviours import Interrupt, StopHere, X, Y, fit, interrupt, model, weights


class Batches(keras.utils.PyDataset):
    """Draws from a generator of its own, and shuffles in place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rng = numpy.random.default_rng(0)
        self.order = numpy.arange(40)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        chosen = self.order[index * 8 : index * 8 + 8]
        return X[chosen] + self.rng.normal(size=(8, 5)).astype("float32"), Y[chosen]

    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


class Augmented(Batches):
    """Augments with a Keras layer."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = keras.layers.GaussianNoise(0.5, seed=5)

    def __getitem__(self, index: int) -> Any:
        return self.noise(X[index * 8 : index * 8 + 8], training=True), Y[index * 8 : index * 8 + 8]


class Global(Batches):
    """Draws from numpy's global generator."""

    def __getitem__(self, index: int) -> Any:
        noise = numpy.random.normal(size=(8, 5)).astype("float32")
        return X[index * 8 : index * 8 + 8] + noise, Y[index * 8 : index * 8 + 8]


class Hidden(Batches):
    """Draws from TensorFlow's generators."""

    def __getitem__(self, index: int) -> Any:
        return X[index * 8 : index * 8 + 8] + tf.random.normal((8, 5)), Y[index * 8 : index * 8 + 8]


def _goes_on(folder: str, options: Any) -> None:
    whole, history, _ = fit(folder + "-whole", **options())
    interrupt(folder, 10, **options())
    made, same, said = fit(folder, **options())

    assert "resumed from step 8" in said and "bit for bit" not in said, said
    assert weights(made) == weights(whole)
    assert same.history == history.history


def a_pydataset_may_have_a_generator_of_its_own(folder: str) -> None:
    _goes_on(folder, lambda: {"x": Batches(), "y": None, "batch_size": None, "epochs": 3})


def threads_may_share_a_generator_of_the_pydataset(folder: str) -> None:
    _goes_on(folder, lambda: {"x": Batches(workers=2), "y": None, "batch_size": None, "epochs": 3})


def a_pydataset_may_augment_with_a_keras_layer(folder: str) -> None:
    _goes_on(folder, lambda: {"x": Augmented(), "y": None, "batch_size": None, "epochs": 3})


class Lazy(Batches):
    """Makes its generator with the first batch, and another with each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.epochs = None, 0  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        if self.rng is None:
            self.rng = numpy.random.default_rng()
        return super().__getitem__(index)

    def on_epoch_end(self) -> None:
        self.epochs += 1
        self.rng = numpy.random.default_rng(self.epochs)


FAR_AWAY: list[Any] = []  # made when first needed: nothing of TensorFlow may run before the fork


class Elsewhere(Batches):
    """Augments with a layer that it does not keep."""

    def __getitem__(self, index: int) -> Any:
        if not FAR_AWAY:
            FAR_AWAY.append(keras.layers.GaussianNoise(0.5, seed=5))
        return FAR_AWAY[0](X[index * 8 : index * 8 + 8], training=True), Y[index * 8 : index * 8 + 8]


class Sometimes(Augmented):
    """Augments only some batches."""

    def __getitem__(self, index: int) -> Any:
        x, y = X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]
        return (self.noise(x, training=True) if index % 2 else x), y


def a_pydataset_may_make_its_generator_late_and_augment_some_batches(folder: str) -> None:
    options = {"y": None, "batch_size": None, "epochs": 3}
    _goes_on(folder + "-lazy", lambda: {"x": Lazy(), **options})
    _goes_on(folder + "-some", lambda: {"x": Sometimes(), **options})


def a_pydataset_to_validate_on_may_draw(folder: str) -> None:
    for number, kind in enumerate((Batches, Global)):
        _goes_on(f"{folder}-{number}", lambda: {"validation_data": kind(), "epochs": 3})  # noqa: B023


def draws_of_a_pydataset_that_cannot_be_made_again_are_told(folder: str) -> None:
    _, _, said = fit(folder, x=Hidden(), y=None, batch_size=None)
    assert "not be bit for bit (same-data): Hidden gives a different batch for the same number" in said
    _, _, said = fit(folder + "-elsewhere", x=Elsewhere(), y=None, batch_size=None)
    assert "not be bit for bit (same-data): Elsewhere gives a different batch for the same number" in said
    _, _, said = fit(folder + "-validated", validation_data=Hidden())
    assert "not validate bit for bit: Hidden gives a different batch" in said


def a_pydataset_that_shuffles_in_place_goes_on_in_rounds(folder: str) -> None:
    """One `fit` for each epoch: the hooks of earlier epochs have moved the same object already."""

    def rounds(where: str, *more: Any) -> Any:
        guarded_fit._ended.clear()
        made, data = model(), Batches()
        with redirect_stderr(StringIO()):
            for epoch in range(3):
                guard = buoy.keras.Guard(where, save=2)
                made.fit(data, epochs=epoch + 1, initial_epoch=epoch, verbose=0, callbacks=[guard, *more])
        return made

    whole = rounds(folder + "-whole")
    _interrupted(rounds, folder, 13)

    assert weights(rounds(folder)) == weights(whole)


def a_shuffled_set_to_validate_on_goes_on_in_rounds(folder: str) -> None:
    def rounds(where: str, *more: Any) -> Any:
        guarded_fit._ended.clear()
        made, history = model(), None
        # A part of it, so that its order shows.
        checked = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=5).batch(4).take(3)
        with redirect_stderr(StringIO()):
            for epoch in range(3):
                options = {"epochs": epoch + 1, "initial_epoch": epoch, "validation_data": checked}
                callbacks = [buoy.keras.Guard(where, save=2), *more]
                history = made.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks, **options)
        assert history is not None
        return history.history

    whole = rounds(folder + "-whole")
    _interrupted(rounds, folder, 13)

    assert rounds(folder) == whole


def generators_in_the_pipeline_to_validate_on_go_on_and_what_cannot_is_told(folder: str) -> None:
    def options(**parallel: Any) -> dict[str, Any]:
        drawn, noise = tf.random.Generator.from_seed(3), keras.layers.GaussianNoise(0.5, seed=4)

        def noisy(x: Any, y: Any) -> Any:
            return noise(x + tf.cast(drawn.normal([5]), x.dtype), training=True), y

        checked = tf.data.Dataset.from_tensor_slices((X, Y)).map(noisy, **parallel).batch(8)
        return {"epochs": 3, "validation_data": checked}

    _goes_on(folder, options)
    *_, said = fit(folder + "-parallel", **options(num_parallel_calls=2))

    assert "will not validate bit for bit: a parallel map draws" in said, said


def _two_stages(folder: str, data: Any) -> None:
    """Transfer learning: train, compile anew, train on over the same data into a folder of its own."""

    def stages(where: str, *more: Any) -> Any:
        guarded_fit._ended.clear()
        made = model()
        fed = data()
        with redirect_stderr(StringIO()):
            for name in ("head", "all"):
                made.compile("adam", "mse")
                guard = buoy.keras.Guard(f"{where}-{name}", save=2)
                made.fit(fed, epochs=2, verbose=0, callbacks=[guard, *more])
        return made

    whole = stages(folder + "-whole")
    _interrupted(stages, folder, 18)

    assert weights(stages(folder)) == weights(whole)


def a_second_training_over_the_same_pipeline_goes_on_in_its_order(folder: str) -> None:
    _two_stages(folder, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40).batch(8))


def a_second_training_validates_on_the_same_set_in_its_order(folder: str) -> None:
    def stages(where: str, *more: Any) -> list[Any]:
        guarded_fit._ended.clear()
        made, found = model(), []
        checked = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=5).batch(4).take(3)
        with redirect_stderr(StringIO()):
            for name in ("head", "all"):
                made.compile("adam", "mse")
                callbacks = [buoy.keras.Guard(f"{where}-{name}", save=2), *more]
                options = {"epochs": 3, "verbose": 0, "validation_data": checked, "callbacks": callbacks}
                found.append(made.fit(X, Y, batch_size=8, **options).history)
        return found

    whole = stages(folder + "-whole")
    _interrupted(stages, folder, 23)

    assert stages(folder) == whole


def an_unseeded_set_to_validate_on_is_told_in_words_of_its_own(folder: str) -> None:
    tf.random.set_seed(None)
    checked = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40).batch(8)
    *_, said = fit(folder, validation_data=checked)

    assert "will not validate bit for bit: the pipeline shuffles without a seed; hint" in said, said


def a_second_training_over_the_same_pydataset_goes_on_in_its_order(folder: str) -> None:
    _two_stages(folder, Batches)


def a_cell_run_again_over_a_pipeline_that_was_shuffled_is_told(folder: str) -> None:
    """The seeds of the interrupted pass are drawn, and nothing brings them back."""

    def again(name: str, **shuffle: Any) -> str:
        keras.utils.set_random_seed(3)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, **shuffle)
        options = {"y": None, "batch_size": None, "epochs": 3}
        interrupt(folder + name, 8, x=data.batch(8), **options)  # the cell makes its batches anew
        return str(fit(folder + name, x=data.batch(8), **options)[2])

    assert "was shuffled for this epoch already" in again("-each")
    assert "shuffled" not in again("-once", reshuffle_each_iteration=False)


def _interrupted(training: Any, folder: str, step: int) -> None:
    try:
        training(folder, Interrupt(step))
    except StopHere:
        return
    raise AssertionError("the training was not interrupted")


def main(name: str, folder: str) -> None:
    globals()[name](folder)
