"""What a guard does at the edges of a training; each function is one behaviour, run in a process of its own."""

from __future__ import annotations

import json
import os
import random
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy
import tensorflow as tf

import buoy
from buoy._compat import keras as borrowed
from buoy.checkpoint.store import Store
from buoy.errors import BuoyError
from buoy.keras import guarded_fit
from buoy.keras.data.pipeline import examine
from buoy.keras.memory.device import session_memory
from buoy.keras.state.tensors import to_tensor, write_weights_h5
from tests.checkpoint.ground import forge

X = numpy.random.default_rng(0).normal(size=(40, 5)).astype("float32")
Y = X.sum(1, keepdims=True)


class StopHere(Exception):  # noqa: N818 - what it says
    """The cell is interrupted."""


class Interrupt(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.seen = step, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen == self.step:
            raise StopHere


def model(width: int = 3) -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(width)(inputs))
    hidden = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.1)])(hidden)
    made = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    made.compile("adam", "mse")
    return made


def fit(folder: str, *more: Any, width: int = 3, **options: Any) -> tuple[Any, Any, str]:
    """(model, history, what was said) of a training of 5 steps per epoch, as in a process that starts anew."""
    guarded_fit._ended.clear()
    made = model(width)
    given = {"x": X, "y": Y, "batch_size": 8, "epochs": 2, "verbose": 0, **options}
    with redirect_stderr(StringIO()) as said:
        history = made.fit(**given, callbacks=[buoy.keras.Guard(folder, save=2), *more])
    return made, history, said.getvalue()


def interrupt(folder: str, step: int, **options: Any) -> None:
    try:
        fit(folder, Interrupt(step), **options)
    except StopHere:
        return
    raise AssertionError("the training was not interrupted")


def weights(made: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in [*made.variables, *made.optimizer.variables]]


def a_finished_run_returns_at_once_with_its_weights_and_history(folder: str) -> None:
    # Keras's own generator is made by its first use, and this process is not a new one.
    keras.random.uniform((1,))
    first, history, _ = fit(folder)
    drawn = numpy.random.rand(3).tolist(), random.random(), keras.random.uniform((3,)).numpy().tolist()
    numpy.random.seed(99)
    again, same, said = fit(folder)

    assert "is finished: 2 epochs, 10 steps" in said
    after = numpy.random.rand(3).tolist(), random.random(), keras.random.uniform((3,)).numpy().tolist()
    assert after == drawn, "what comes after `fit` drew something else"
    assert weights(again) == weights(first)
    assert same.history == history.history and same.epoch == [0, 1]


def a_finished_run_trains_on_when_more_epochs_are_asked_for(folder: str) -> None:
    _, before, _ = fit(folder)
    _, history, _ = fit(folder, epochs=3)

    assert history.epoch == [0, 1, 2]
    assert history.history["loss"][:2] == before.history["loss"]


def once_more(made: Any, guard: Any, **options: Any) -> tuple[Any, str]:
    """(history, what was said) of a further `fit` in the same process."""
    given = {"x": X, "y": Y, "batch_size": 8, "verbose": 0, **options}
    made.run_eagerly = True  # sooner than a graph for a few steps
    with redirect_stderr(StringIO()) as said:
        history = made.fit(**given, callbacks=[guard])
    return history, said.getvalue()


def a_further_fit_in_one_process_takes_nothing_back(folder: str) -> None:
    made, _, _ = fit(folder)
    made.run_eagerly = True
    guard = buoy.keras.Guard(folder)
    drawn = []
    for epoch in (2, 3):
        made.optimizer.learning_rate = 0.5**epoch
        made.layers[-1].bias.assign([7.0])
        drawn.append((numpy.random.rand(), random.random(), float(keras.random.uniform((1,))[0])))
        before = weights(made)
        seen: list[Any] = []
        look = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append(weights(made)))  # noqa: B023
        guards = [guard if epoch == 2 else buoy.keras.Guard(folder), look]
        with redirect_stderr(StringIO()) as said:
            history = made.fit(
                X, Y, batch_size=8, verbose=0, epochs=epoch + 1, initial_epoch=epoch, callbacks=guards
            )

        assert seen == [before], "something was loaded over the live model"
        assert float(made.optimizer.learning_rate) == 0.5**epoch
        assert "resuming" not in said.getvalue() and "finished" not in said.getvalue()
        assert history.epoch == list(range(epoch + 1))
    newest = Store(folder).newest(print)

    assert len(set(drawn)) == 2, "the script's own draws were rewound"
    assert newest is not None and newest.step == 20


def another_model_or_optimizer_in_one_process_is_loaded(folder: str) -> None:
    trained, _, _ = fit(folder)
    _, said = once_more(model(), buoy.keras.Guard(folder), epochs=3)
    assert "resumed from step 10 (epoch 3)" in said

    trained.compile("adam", "mse")
    _, said = once_more(trained, buoy.keras.Guard(folder), epochs=4)
    assert "resumed from step 15 (epoch 4)" in said and int(trained.optimizer.iterations) == 20


def a_fit_that_would_train_nothing_is_an_error_in_the_script_that_trained(folder: str) -> None:
    made, _, _ = fit(folder, epochs=1)
    for other in (made, model()):
        try:
            once_more(other, buoy.keras.Guard(folder), epochs=1)
        except buoy.BuoyError as error:
            assert "would train nothing" in str(error) and "has 1 epoch already" in str(error)
            assert "epochs=2, initial_epoch=1" in str(error.hint)
        else:
            raise AssertionError("an untrained model was returned")
    _, said = once_more(made, buoy.keras.Guard(folder), epochs=2, initial_epoch=1)

    assert "trains nothing" not in said and int(made.optimizer.iterations) == 10


def a_script_of_many_fits_that_is_started_again_says_how_far_it_is(folder: str) -> None:
    def script(*more: Any) -> tuple[Any, str]:
        guarded_fit._ended.clear()
        made, words = model(), ""
        made.run_eagerly = True  # a graph for each `fit` would take most of the time
        for epoch in range(3):
            chosen = numpy.random.permutation(40)[:20]
            with redirect_stderr(StringIO()) as said:
                try:
                    made.fit(
                        X[chosen], Y[chosen], batch_size=4, verbose=0, epochs=epoch + 1, initial_epoch=epoch,
                        callbacks=[buoy.keras.Guard(place, save=2), *more],
                    )  # fmt: skip
                finally:
                    words += said.getvalue()
        return made, words

    place = f"{folder}-whole"
    whole, _ = script()
    place = folder
    try:
        script(Interrupt(10))
    except StopHere:
        pass
    resumed, said = script()

    assert "epoch 1 is done already" in said and "is finished" not in said, said
    assert said.count("further on, after step 8 in epoch 2, batch 4") == 1
    assert said.count("resumed from step 8 (epoch 2, batch 4)") == 1
    assert weights(resumed) == weights(whole)
    _, said = script()
    assert said.count("is finished: 3 epochs, 15 steps") == 3


def the_end_of_an_epoch_counted_in_steps_is_no_batch_of_it(folder: str) -> None:
    options = {
        "x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat(),
        "y": None,
        "batch_size": None,
    }
    interrupt(folder, 9, epochs=3, steps_per_epoch=4, **options)
    _, _, said = fit(folder, epochs=3, steps_per_epoch=4, **options)

    assert "resumed from step 8 (epoch 2, at its end)" in said, said


def a_cell_that_is_run_again_goes_on_though_its_layers_have_other_names(folder: str) -> None:
    whole, history, _ = fit(folder + "-whole")
    interrupt(folder, 8)
    resumed, same, said = fit(folder)

    assert "resumed from step 6 (epoch 2, batch 2)" in said
    assert weights(resumed) == weights(whole)
    assert same.history == history.history


def a_checkpoint_of_another_model_is_refused_by_name_and_nothing_is_loaded(folder: str) -> None:
    fit(folder)
    other = model(7)
    before = weights(other)
    try:
        other.fit(X, Y, epochs=5, verbose=0, callbacks=[buoy.keras.Guard(folder)])
    except buoy.BuoyError as error:
        assert "model.dense/kernel has shape (5, 7), but (5, 3) in the checkpoint" in str(error)
        assert "more" in str(error) and error.hint
    else:
        raise AssertionError("not refused")
    assert weights(other)[: len(before)] == before


def the_progress_bar_shows_the_epoch_and_the_batches_of_the_whole_epoch(folder: str) -> None:
    interrupt(folder, 8)
    with redirect_stdout(StringIO()) as shown:
        fit(folder, verbose=2)

    assert "Epoch 2/2" in shown.getvalue() and "5/5 - " in shown.getvalue()
    assert "Epoch 1/2" not in shown.getvalue()


def an_epoch_that_was_killed_before_its_validation_is_validated_with_the_same_metrics(folder: str) -> None:
    class Dies(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            raise StopHere

    options = {"validation_data": (X, Y), "batch_size": 10, "epochs": 1}  # four steps; the last one is saved
    whole, history, _ = fit(folder + "-whole", **options)
    try:
        fit(folder, Dies(), **options)
    except StopHere:
        pass
    resumed, same, said = fit(folder, **options)

    assert "resumed from step 4" in said
    assert same.history == history.history
    assert weights(resumed) == weights(whole)


def a_callback_that_cannot_be_saved_any_more_does_not_end_the_training(folder: str) -> None:
    class Breaks(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.epochs = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs += 1

        def state_dict(self) -> dict[str, int]:
            if self.epochs:
                raise RuntimeError("lost my memory")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    _, history, said = fit(folder, Breaks())
    newest = Store(folder).newest(print)

    assert history.epoch == [0, 1]
    assert said.count("was not saved; training continues: lost my memory") == 1
    assert newest is not None and newest.step == 4


def a_checkpoint_asked_for_at_the_end_of_a_batch_counts_that_batch(folder: str) -> None:
    class Asks(keras.callbacks.Callback):
        def __init__(self, guard: Any) -> None:
            super().__init__()
            self.guard = guard

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                assert self.guard.save(pin="third") is None  # made before the next batch
            if batch == 3:
                raise StopHere

    whole, _, _ = fit(f"{folder}-whole")
    first = model()
    guard = buoy.keras.Guard(folder, save="24h")
    try:
        first.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[Asks(guard), guard])
    except StopHere:
        pass
    resumed, _, said = fit(folder)

    assert "resumed from step 3" in said, said
    assert weights(resumed) == weights(whole)
    assert [entry.about["pin"] for entry in Store(folder).list() if entry.step == 3] == ["third"]


class TwoOptimizers(keras.Model):  # type: ignore[misc]
    """As a GAN has it: an optimizer of its own, which nobody builds before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.layer.build((None, 5))

    def compile(self, own_optimizer: Any) -> None:
        super().compile()
        self.own_optimizer = own_optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.layer(data[0]) - data[1]) ** 2)
        weights = self.layer.trainable_weights
        self.own_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def an_optimizer_that_only_the_training_step_builds_is_refused_by_a_resume_and_built_before_it_goes_on(
    folder: str,
) -> None:
    said = StringIO()

    def train(place: str, *more: Any, built: bool = False) -> list[Any]:
        keras.utils.set_random_seed(1)
        made = TwoOptimizers()
        made.compile(keras.optimizers.Adam(0.1))
        if built:
            made.own_optimizer.build(made.layer.trainable_variables)
        with redirect_stderr(said):
            made.fit(
                X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[buoy.keras.Guard(place, save=2), *more]
            )
        return [variable.numpy().tobytes() for variable in [*made.variables, *made.own_optimizer.variables]]

    whole = train(f"{folder}-whole")
    assert "optimizer.own_optimizer has no variables before its first step" in said.getvalue()
    with suppress(StopHere):
        train(folder, Interrupt(3))
    try:
        train(folder)
    except BuoyError as refused:
        assert "own_optimizer" in str(refused) and ".build(" in str(refused), refused
    else:
        raise AssertionError("its moments would have started over")
    with suppress(StopHere):
        train(folder, Interrupt(7), built=True)

    assert train(folder, built=True) == whole


def own_loop(folder: str, save_at: int = 0, in_body: bool = True) -> tuple[float, str]:
    """(the sum of all batches, weighted by the epoch; what was said) of 2 epochs of 4; left where it was saved."""
    total, numbers = tf.Variable(0.0), tf.data.Dataset.range(1, 5)
    with redirect_stderr(StringIO()) as said:
        loop = buoy.keras.Loop(folder, save="24h")
        loop.track(total=total)
        for _ in loop.epochs(2):
            total.assign(total * 3)
            for number in loop.batches(numbers):
                total.assign_add(float(number))
                if in_body and loop.step == save_at:
                    loop.save()
                    raise StopHere
            total.assign(total * 5)
            if loop.step == save_at:
                loop.save()
                raise StopHere
    return float(total), said.getvalue()


def a_loop_keeps_the_values_beside_its_variables_and_refuses_what_it_cannot_keep(folder: str) -> None:
    def train(place: str, stop_at: int = 0) -> tuple[Any, ...]:
        draws, history, limit = numpy.random.default_rng(7), [], numpy.zeros(2)
        counters: dict[str, Any] = {"history": history, "best": tf.constant(0.0)}
        numbers = tf.data.Dataset.range(4)
        loop = buoy.keras.Loop(place, save=1)
        loop.track(counters=counters, draws=draws, limit=limit, total=tf.Variable(0.0))
        for _ in loop.epochs(2):
            limit += 1
            for number in loop.batches(numbers):
                if loop.step == stop_at:
                    raise StopHere
                history.append(float(number) + draws.random())
                counters["best"] = tf.maximum(counters["best"], history[-1])
        return history, float(counters["best"]), limit.tolist(), draws.random()

    whole = train(f"{folder}-whole")
    try:
        train(folder, stop_at=7)
    except StopHere:
        pass

    assert len(whole[0]) == 8 and train(folder) == whole
    loop = buoy.keras.Loop(f"{folder}-refused")
    for thing, word in (
        (3, "keep it in a dict"),
        ({"metric": keras.metrics.Mean()}, "one by one"),
        (Interrupt(1).on_train_batch_end, "both methods"),
    ):
        try:
            loop.track(thing=thing)
        except buoy.BuoyError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"not refused: {thing}")


def a_loop_saved_at_the_end_of_a_body_or_of_an_epoch_does_nothing_twice(folder: str) -> None:
    whole, _ = own_loop(f"{folder}-whole")
    for where, in_body in ((3, True), (4, True), (4, False), (6, True)):
        place = f"{folder}-{where}-{in_body}"
        try:
            own_loop(place, where, in_body)
        except StopHere:
            pass
        total, said = own_loop(place)

        assert f"buoy: resumed from step {where} (epoch " in said, said
        assert total == whole, (where, in_body, total, whole)


def what_another_kind_of_training_saved_is_refused(folder: str) -> None:
    fit(folder)
    try:
        buoy.keras.Loop(folder)
    except buoy.BuoyError as error:
        assert "made by buoy.keras.Guard" in str(error)
    else:
        raise AssertionError("not refused")


def two_that_restore_the_model_are_refused(folder: str) -> None:
    try:
        fit(folder, keras.callbacks.BackupAndRestore(folder + "-backup"))
    except buoy.BuoyError as error:
        assert "BackupAndRestore" in str(error) and "leave BackupAndRestore out" in str(error.hint)
    else:
        raise AssertionError("not refused")


def an_exported_weights_file_is_loaded_by_a_fresh_model(folder: str) -> None:
    trained, _, _ = fit(folder)
    checkpoint = Store(folder).newest(print)
    assert checkpoint is not None
    write_weights_h5(checkpoint, folder + ".weights.h5")
    try:
        write_weights_h5(checkpoint, folder + "/no/such.weights.h5")
    except buoy.BuoyError as error:
        assert "No such file or directory" in str(error)
    else:
        raise AssertionError("a file in a folder that is not there was written")
    fresh = model()
    fresh.load_weights(folder + ".weights.h5")

    assert all(
        (one.numpy() == other.numpy()).all()
        for one, other in zip(fresh.weights, trained.weights, strict=True)
    )
    assert not list(Path(folder).parent.glob("*.part-*"))


def a_generator_that_does_not_repeat_itself_is_found_out(folder: str) -> None:
    def endless() -> Any:
        while True:
            drawn = numpy.frombuffer(os.urandom(20), "uint8").reshape(4, 5).astype("float32")
            yield drawn, drawn[:, :1]

    interrupt(folder, 5, x=endless(), y=None, batch_size=None, steps_per_epoch=4)
    _, _, said = fit(folder, x=endless(), y=None, batch_size=None, steps_per_epoch=4)

    assert "reading 4 batches of the generator again" in said
    assert "the generator gave different batches than in the last attempt" in said


def a_pipeline_with_another_seed_is_found_out(folder: str) -> None:
    def pipeline(seed: int) -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(10, seed=seed).batch(8)

    interrupt(folder, 5, x=pipeline(1), y=None, batch_size=None)
    _, _, said = fit(folder, x=pipeline(2), y=None, batch_size=None)

    assert "not be bit for bit (approximate): the pipeline shuffles with different seeds" in said


def a_dataset_whose_threads_draw_nothing_keeps_them(folder: str) -> None:
    class Plain(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]

    _, _, said = fit(folder, x=Plain(workers=2), y=None, batch_size=None)

    assert "one at a time" not in said


def the_grade_of_a_pipeline_is_read_from_it(folder: str) -> None:
    def unseeded(item: Any) -> Any:
        return item + tf.random.uniform([], dtype=tf.float32)

    floats = tf.data.Dataset.range(8).map(lambda item: tf.cast(item, tf.float32))
    assert examine(floats.shuffle(4)).grade == "approximate"
    assert examine(floats.map(unseeded)).grade == "same-data"
    assert examine(tf.data.Dataset.range(3).interleave(lambda _: floats.shuffle(4))).grade == "approximate"
    keras.utils.set_random_seed(1)
    flip = keras.layers.RandomFlip()
    images = tf.data.Dataset.from_tensor_slices(numpy.zeros((4, 4, 4, 3), "float32"))

    def stateless(number: Any, item: Any) -> Any:
        return item + tf.random.stateless_normal([], [number, 1])

    def flipped(image: Any) -> Any:
        return flip(image, training=True)

    def by_python(item: Any) -> Any:
        return tf.numpy_function(lambda value: value, [item], tf.float32)

    def one(number: Any) -> Any:
        return tf.data.Dataset.from_tensors(number)

    numbers = tf.data.Dataset.range(3)
    grades = {
        "shuffled": (floats.shuffle(4).batch(2), "bitwise"),
        "cached, then shuffled": (floats.cache().shuffle(4), "bitwise"),
        "shuffled, then cached": (floats.shuffle(4).cache(), "approximate"),
        "random, in order": (floats.map(unseeded), "bitwise"),
        "random, in parallel": (floats.map(unseeded, num_parallel_calls=2), "same-data"),
        "stateless, in parallel": (floats.enumerate().map(stateless, num_parallel_calls=2), "bitwise"),
        "a layer, in order": (images.map(flipped), "bitwise"),
        "a layer, in parallel": (images.map(flipped, num_parallel_calls=2), "same-data"),
        "in any order": (floats.map(tf.square, num_parallel_calls=2, deterministic=False), "approximate"),
        "interleaved": (numbers.interleave(one, num_parallel_calls=2), "bitwise"),
        "interleaved in any order": (
            numbers.interleave(one, num_parallel_calls=2, deterministic=False),
            "approximate",
        ),
        "by Python": (floats.map(by_python), "same-data"),
    }
    found = {name: examine(dataset).grade for name, (dataset, _) in grades.items()}
    assert found == {name: grade for name, (_, grade) in grades.items()}


def a_layer_that_draws_from_a_hidden_generator_is_found_out(folder: str) -> None:
    class Hidden(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs + tf.random.normal(tf.shape(inputs))

    _, _, said = fit(folder + "-known")
    assert "bit for bit" not in said

    for eager in (False, True):
        made = keras.Sequential([keras.Input((5,)), Hidden(), keras.layers.Dense(1)])
        made.compile("sgd", "mse", run_eagerly=eager)
        with redirect_stderr(StringIO()) as heard:
            made.fit(X, Y, verbose=0, callbacks=[buoy.keras.Guard(f"{folder}-{eager}", save=1)])
        found = Store(f"{folder}-{eager}").newest(print)
        assert found is not None
        exactness: Any = found.value("training", to_tensor)

        assert ("not be bit for bit (same-data)" in heard.getvalue()) is not eager
        assert exactness["exactness"]["grade"] == ("bitwise" if eager else "same-data")


def the_states_of_a_stateful_rnn_go_on(folder: str) -> None:
    """Keras does not count them among the variables of the model."""

    def live(where: str, *more: Any) -> Any:
        keras.utils.set_random_seed(3)
        made = keras.Sequential(
            [keras.Input((3, 2), batch_size=4), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
        )
        made.compile("sgd", "mse")
        x = numpy.random.normal(size=(16, 3, 2))
        try:
            guard = buoy.keras.Guard(where, save=1)
            made.fit(
                x, x[:, 0, :1], batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[guard, *more]
            )
        except StopHere:
            pass
        return made

    whole = live(f"{folder}-whole")
    live(folder, Interrupt(6))
    resumed = live(folder)

    assert weights(resumed) == weights(whole)
    states = [[each.numpy().tobytes() for each in made.layers[0].states] for made in (resumed, whole)]
    assert states[0] == states[1]


def an_image_data_generator_with_a_seed_goes_on(folder: str) -> None:
    """It seeds numpy itself for each batch, from a count that a new process begins anew."""
    from keras.src.legacy.preprocessing.image import ImageDataGenerator

    def live(where: str, *more: Any) -> Any:
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input((3, 3, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        x = numpy.random.normal(size=(16, 3, 3, 1))
        flow = ImageDataGenerator(horizontal_flip=True, vertical_flip=True).flow(x, x[:, 0, 0], 4, seed=7)
        try:
            made.fit(flow, epochs=4, verbose=0, callbacks=[buoy.keras.Guard(where, save=1), *more])
        except StopHere:
            pass
        return made

    whole = live(f"{folder}-whole")
    live(folder, Interrupt(10))

    assert weights(live(folder)) == weights(whole)


def a_shuffled_validation_set_is_evaluated_in_the_same_order(folder: str) -> None:
    def options() -> dict[str, Any]:
        keras.utils.set_random_seed(3)
        both = tf.data.Dataset.from_tensor_slices((X * 1000, Y)).shuffle(40)
        return {
            "x": both.take(30).batch(8), "y": None, "batch_size": None, "epochs": 3,
            "validation_data": both.skip(30).shuffle(10).batch(3),
        }  # fmt: skip

    _, history, _ = fit(folder + "-whole", **options())
    interrupt(folder, 10, **options())
    _, same, said = fit(folder, **options())

    assert "resumed from step 8" in said
    assert same.history == history.history


def what_fits_its_checksums_and_is_not_what_a_guard_saves_is_refused_in_words(folder: str) -> None:
    def expect_refusal() -> None:
        try:
            fit(folder)
        except buoy.BuoyError as error:
            assert error.hint, error
            return
        raise AssertionError("something else was taken for what a Guard saves")

    interrupt(folder, 7)
    (newest,) = [entry.folder for entry in Store(folder).list()][:1]
    values = json.loads((Path(newest) / "values.json").read_bytes())
    for place in ("position", "seed"):
        odd = {**values, "training": {**values["training"], place: [[]]}}
        forge(Path(newest), odd)
        expect_refusal()
    for name in ("model", "rng", "micro_batch"):
        forge(Path(newest), {**values, name: 7})
        expect_refusal()


def a_keras_that_buoy_does_not_know_trains_without_what_it_lacks(folder: str) -> None:
    """A name that is gone, in each of the places where one is looked for; and a version from before and after."""
    assert {part: borrowed.why_not(part) for part in borrowed.NEEDS} == dict.fromkeys(borrowed.NEEDS)
    gone = (
        ("resume", (borrowed._EPOCHS, "_walks_no_more")),
        ("resume", ("keras.src.no_such_module", "anything")),
        ("resume", ("keras.src.trainers.NoSuchClass", "anything")),
        ("micro-batches", (borrowed._LOSS, "_no_losses")),
    )
    for number, (part, name) in enumerate(gone):
        with patch.dict(borrowed.NEEDS, {part: (*borrowed.NEEDS[part], name)}):
            _, history, said = fit(f"{folder}{number}")
        assert len(history.history["loss"]) == 2
        assert f"Keras {keras.__version__} has no {'.'.join(name)}" in said, said
        if part == "resume":
            assert "is off" in said and "cannot be resumed" in said and not Path(f"{folder}{number}").exists()
        else:
            assert "not split when memory runs out" in said
            assert Store(f"{folder}{number}").newest(print) is not None
    for version in ("3.7.0", "4.0.0"):
        with patch.object(
            borrowed, "_version", lambda version=version: tuple(map(int, version.split(".")[:2]))
        ):
            _, history, said = fit(f"{folder}-{version}")
            try:
                buoy.keras.Loop(f"{folder}-loop")
            except BuoyError as refused:
                assert "Loop cannot be used: it knows Keras 3.8 to" in str(refused)
            else:
                raise AssertionError("a loop that cannot resume")
        assert len(history.history["loss"]) == 2 and "is off: it knows Keras 3.8 to" in said, said
    with patch.object(borrowed, "_version", lambda: (3, 99)):
        _, _, said = fit(f"{folder}-newer")
    assert "is newer than what buoy was tested with" in said and Path(f"{folder}-newer").exists()


def small_arrays_that_come_again_are_measured_again(folder: str) -> None:
    """TensorFlow's pool does not count what is smaller than 256 KiB, and the C library keeps it for the next."""
    memory, rises = session_memory(), []
    for _ in range(4):
        memory.mark(again=True)
        arrays = [tf.fill([25_000], 1.0) for _ in range(60)]
        rises.append(memory.rise())
        del arrays

    assert min(rise or 0 for rise in rises) > 5_000_000, rises


def main(name: str, folder: str) -> None:
    globals()[name](folder)
