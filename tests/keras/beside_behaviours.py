"""What lives beside the weights (in callbacks, losses, other optimizers) goes on too; run as in behaviours.py."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

import buoy
from buoy.keras import guarded_fit
from buoy.keras.state import callbacks as memory
from buoy.keras.state.tracked import Holdings
from tests.keras.behaviours import Interrupt, StopHere, X, Y, weights


def live(folder: str, make: Any, *more: Any, data: Any = None, **options: Any) -> tuple[Any, Any, str]:
    """(model, history, what was said); `make` gives a compiled model and its callbacks. Five steps per epoch."""
    keras.utils.set_random_seed(3)
    made, callbacks = make()
    given = {
        "x": X,
        "y": Y,
        "batch_size": 8,
        "epochs": 3,
        "verbose": 0,
        **options,
        **(data() if data else {}),
    }
    history = None
    with redirect_stderr(StringIO()) as said:
        try:
            history = made.fit(**given, callbacks=[buoy.keras.Guard(folder, save=2), *callbacks, *more])
        except StopHere:
            pass
    return made, history, said.getvalue()


def goes_on(folder: str, make: Any, step: int = 9, **options: Any) -> None:
    whole, history, _ = live(f"{folder}-whole", make, **options)
    live(folder, make, Interrupt(step), **options)
    resumed, same, said = live(folder, make, **options)

    assert f"resumed from step {(step - 1) // 2 * 2}" in said, said
    assert weights(resumed) == weights(whole)
    assert same.history == history.history


def plain(loss: Any = "mse") -> Any:
    made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(1e-2), loss)
    return made


class Paced(keras.callbacks.Callback):
    """Sets the learning rate from what it remembers."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def pace(self, loss: float) -> Any:
        raise NotImplementedError

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(1e-2 * self.pace(logs["loss"]))


class Smoothed(Paced):
    def pace(self, loss: float) -> Any:
        self.memory.append(loss)
        return numpy.mean(self.memory)


class Best(Paced):
    def pace(self, loss: float) -> Any:
        self.memory = min(self.memory, (loss, self.memory[1] + 1))
        return 1 / self.memory[1]


class Levels(Paced):
    def pace(self, loss: float) -> Any:
        self.memory.add(round(loss, 2))
        return 1 / len(self.memory)


class Rounded(Paced):
    def pace(self, loss: float) -> Any:
        self.memory = self.memory * 0.9 + 0.01 * loss  # stays what it is: numpy's float32, or a tensor
        return self.memory


class Listed(Paced):
    def pace(self, loss: float) -> Any:
        self.memory["losses"].append(loss)
        return 1 / len(self.memory["losses"])


def a_callback_remembers_deques_sets_tuples_and_numbers_as_they_are(folder: str) -> None:
    def callbacks() -> list[Any]:
        return [
            Smoothed(deque(maxlen=4)), Best((9e9, 0)), Levels(set()), Rounded(numpy.float32(1)),
            Rounded(tf.constant(1.0)), Listed(defaultdict(list)),
        ]  # fmt: skip

    for number in range(len(callbacks())):
        goes_on(f"{folder}{number}", lambda number=number: (plain(), [callbacks()[number]]))


def a_list_that_the_script_gave_to_a_callback_is_filled(folder: str) -> None:
    losses: list[list[float]] = []

    def make() -> Any:
        losses.append([])
        return plain(), [Smoothed(losses[-1])]

    goes_on(folder, make)

    assert losses[2] == losses[0]


def a_variable_that_a_callback_moves_goes_on(folder: str) -> None:
    class Anneal(keras.callbacks.Callback):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = weight

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.weight.assign(self.weight * 1.5)

    for kind in (tf.Variable, keras.Variable):

        def make(kind: Any = kind) -> Any:
            weight = kind(0.5, trainable=False)
            return plain(lambda y, p: weight * keras.losses.mean_squared_error(y, p)), [Anneal(weight)]

        goes_on(f"{folder}-{kind.__module__}", make)


def a_kind_of_keras_own_callback_keeps_what_it_adds(folder: str) -> None:
    class Warm(keras.callbacks.EarlyStopping):
        def __init__(self) -> None:
            super().__init__("loss", patience=50)
            self.made = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.made += 1
            self.patience += 1
            self.model.optimizer.learning_rate.assign(1e-2 / (self.made + self.patience))

    goes_on(folder, lambda: (plain(), [Warm()]))


def a_variable_in_a_loss_goes_on(folder: str) -> None:
    class Weighted(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.weight = keras.Variable(0.5, trainable=False)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return self.weight * keras.losses.mean_squared_error(y_true, y_pred)

    def make() -> Any:
        loss = Weighted()
        grow = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: loss.weight.assign(loss.weight * 2)
        )
        return plain(loss), [grow]

    goes_on(folder, make)


def layers_that_a_callback_froze_are_warned_about_when_it_happens_and_at_the_resume(folder: str) -> None:
    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.layers[0].trainable = False
                self.model.make_train_function(force=True)

    *_, froze = live(folder, lambda: (plain(), [Freeze()]), Interrupt(9))
    *_, said = live(folder, lambda: (plain(), []))

    assert froze.count("a callback froze or unfroze layers") == 1, froze
    assert "had frozen or unfrozen layers before this checkpoint" in said, said


class Banked(keras.Model):  # type: ignore[misc]
    """Keeps variables of TensorFlow in a dict and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.bank = {"mean": tf.Variable(tf.zeros((1,)), trainable=False)}
        self.drawn = [tf.random.Generator.from_seed(1)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = self.dense(inputs)
        if training:
            self.bank["mean"].assign(0.9 * self.bank["mean"] + tf.reduce_mean(outputs, 0))
            outputs += 0.1 * self.drawn[0].normal(tf.shape(outputs))
        return outputs + self.bank["mean"]


def variables_that_a_model_keeps_in_dicts_and_lists_go_on(folder: str) -> None:
    def make() -> Any:
        made = Banked()
        made.compile("sgd", "mse")
        return made, []

    goes_on(folder, make)


class Filled(keras.Model):  # type: ignore[misc]
    """Fills a dict in its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.bank: dict[str, Any] = {}

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        with tf.init_scope():
            if not self.bank:
                self.bank["seen"] = tf.Variable(0.0, trainable=False)
        self.bank["seen"].assign_add(1.0)
        return super().train_step(data)


def a_container_that_was_filled_later_or_not_yet_saved_does_not_forbid_a_resume(folder: str) -> None:
    """As in a checkpoint of an older buoy, which saved nothing out of containers."""

    def make(bank: Any) -> Any:
        made = Filled()
        made.bank.update(bank)
        made.compile("sgd", "mse")
        return made, []

    live(f"{folder}0", lambda: make({}), Interrupt(9))
    *_, later = live(f"{folder}0", lambda: make({}))
    live(f"{folder}1", lambda: make({"seen": tf.Variable(0.0)}), Interrupt(9))
    *_, older = live(f"{folder}1", lambda: make({"seen": tf.Variable(0.0), "more": tf.Variable(0.0)}))

    assert "filled.bank.seen/Variable start over: in the checkpoint, but not here yet" in later, later
    assert "filled.bank.more/Variable start over: not in the checkpoint" in older, older
    assert "resumed from step 8" in later and "resumed from step 8" in older


def an_attribute_that_is_a_weight_keeps_its_name_and_tables_of_numbers_cost_nothing(folder: str) -> None:
    made = plain()
    made.first = made.layers[0].kernel.value
    made.table = [[0.0] * 1000 for _ in range(1000)]
    began = time.process_time()
    names = Holdings(made).items()["model"]

    assert time.process_time() - began < 0.6
    assert any(name.startswith("sequential.first/") for name in names), "as in older checkpoints"


class Several(keras.Model):  # type: ignore[misc]
    """Trains its parts with optimizers that it keeps in a dict, a list, and in a compiled model inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(4), keras.layers.Dense(4)]
        self.inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.inner.compile(keras.optimizers.Adam(1e-2))
        self.named = {"first": keras.optimizers.Adam(1e-2)}
        self.others = [keras.optimizers.Adam(1e-2)]

    def call(self, inputs: Any) -> Any:
        return self.inner(self.parts[1](self.parts[0](inputs)))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, self(x, training=True)))
        optimizers = [self.named["first"], self.others[0], self.inner.optimizer]
        for optimizer, part in zip(optimizers, [*self.parts, self.inner], strict=True):
            trained = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return {"error": loss}


def optimizers_in_a_dict_a_list_and_an_inner_model_go_on(folder: str) -> None:
    def make() -> Any:
        made = Several()
        made.compile(loss="mse")
        made(X[:1])
        optimizers = [made.named["first"], made.others[0], made.inner.optimizer]
        for optimizer, part in zip(optimizers, [*made.parts, made.inner], strict=True):
            optimizer.build(part.trainable_variables)
        return made, []

    goes_on(folder, make)


class Reads(keras.callbacks.Callback):
    """Looks at some data after each epoch."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self._look = read

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._look(self.model)


def a_callback_that_reads_the_shuffled_training_data_is_told(folder: str) -> None:
    def said_of(where: str, look: Any) -> str:
        keras.utils.set_random_seed(3)
        slices = tf.data.Dataset.from_tensor_slices((X, Y))
        shuffled = slices.shuffle(40)
        data = {"x": shuffled.batch(8), "y": None, "batch_size": None}
        data["validation_data"] = shuffled.skip(30).batch(8)  # counted: nothing to tell
        reads = [Reads(lambda model: look(model, shuffled, slices))]
        return live(where, lambda: (plain(), reads), **data)[2]

    told = "reads the shuffled training data"
    assert told not in said_of(f"{folder}0", lambda model, shuffled, slices: next(iter(slices.batch(4))))
    assert (
        said_of(f"{folder}1", lambda model, shuffled, slices: next(iter(shuffled.take(1)))).count(told) == 1
    )
    assert told in said_of(
        f"{folder}2", lambda model, shuffled, slices: model.evaluate(shuffled.batch(4), verbose=0)
    )


def a_loop_that_reads_its_shuffled_data_beside_its_batches_is_told(folder: str) -> None:
    keras.utils.set_random_seed(3)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40).batch(8)
    said = StringIO()
    with redirect_stderr(said):
        loop = buoy.keras.Loop(folder)
        loop.track(counters={"epochs": 0})
        for epoch in loop.epochs(3):
            for _ in loop.batches(data):
                pass
            if epoch == 0:
                assert "reads the shuffled training data" not in said.getvalue()
            next(iter(data))

    assert said.getvalue().count("reads the shuffled training data") == 1


def a_loop_whose_models_own_optimizer_is_not_tracked_is_told(folder: str) -> None:
    for number, tracks in enumerate((False, True)):
        model = keras.Sequential([keras.layers.Input((X.shape[1],)), keras.layers.Dense(Y.shape[1])])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        said = StringIO()
        with redirect_stderr(said):
            loop = buoy.keras.Loop(f"{folder}/{number}")
            loop.track(model=model, **({"optimizer": model.optimizer} if tracks else {}))
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
            for _ in loop.epochs(2):
                for x, y in loop.batches(data):
                    model.train_on_batch(x, y)
        assert said.getvalue().count("starts over after a resume") == (not tracks)


def a_generator_to_validate_on_is_told(folder: str) -> None:
    def batches() -> Any:
        while True:
            yield X[:4], Y[:4]

    _, _, said = live(folder, lambda: (plain(), []), validation_data=batches(), validation_steps=3)

    assert "will not validate bit for bit" in said


class Odd(keras.callbacks.Callback):
    """Holds what no checkpoint has: it starts over, and the training goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = (random.Random(1), numpy.random.default_rng(2))
        self.mean = keras.metrics.Mean()
        self.parts = {"one": tf.Variable(1.0)}
        self.own = tf.data.Dataset.range(4).shuffle(4, seed=1)
        self.steady = tf.data.Dataset.range(4).shuffle(4, seed=1, reshuffle_each_iteration=False)
        self.by_layer = {keras.layers.Dense(1): 1.0}
        self.word = tf.Variable("abc")
        self.half = tf.constant([1.0], tf.bfloat16)
        self.itself: deque[Any] = deque()
        self.itself.append(self.itself)
        self.place: Any = Path("a")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.place = Path(f"{epoch}")


def what_a_callback_holds_and_no_checkpoint_has_is_named(folder: str) -> None:
    def make() -> Any:
        return plain(), [Odd()]

    _, _, said = live(f"{folder}-named", make)
    lines = [
        line for line in said.splitlines() if line.startswith("buoy: Odd has attributes that are not saved")
    ]
    named = {name for line in lines for name in line.partition("a resume: ")[2].partition(";")[0].split(", ")}

    assert {"generators", "mean", "parts", "own", "place"} <= named, said
    assert not named & {"steady", "by_layer", "half", "itself"}, "as long as nobody puts another in its place"
    assert said.count("place") == 1, "once"
    goes_on(folder, make, step=12)


def what_an_older_buoy_saved_of_a_callback_starts_over_and_says_so(folder: str) -> None:
    del folder
    odd = Odd()
    stored = [
        {"kind": "Odd", "state": {"generators": [{"buoy.generator": [1, 2]}], "mean": {"buoy.variables": {}}}}
    ]
    words = memory.Memory([odd], print).load(stored)

    assert len(words) == 2 and all("starts over in" in each for each in words), words


def what_the_script_changes_in_a_callback_between_two_fits_stays(folder: str) -> None:
    class Weighted(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = tf.Variable(1.0), []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(float(self.weight.numpy()))
            self.weight.assign(self.weight * 2)

    made, callback = plain(), Weighted()
    for epoch in range(2):
        guard = buoy.keras.Guard(folder, save=2)
        made.fit(X, Y, 8, epochs=epoch + 1, initial_epoch=epoch, verbose=0, callbacks=[guard, callback])
        if epoch == 0:
            callback.weight.assign(100.0)

    assert callback.seen == [1.0, 100.0]


def a_callback_that_reads_the_data_before_the_first_batch_is_not_told(folder: str) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40).batch(8)

    class Sampling(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            next(iter(data))

    with redirect_stderr(StringIO()) as said:
        plain().fit(data, epochs=2, verbose=0, callbacks=[buoy.keras.Guard(folder), Sampling()])

    assert "reads the shuffled training data" not in said.getvalue()


def a_csv_log_has_each_epoch_once_and_its_columns_in_place(folder: str) -> None:
    def training(where: str, step: int = 0) -> str:
        keras.utils.set_random_seed(3)
        made, log = plain(), f"{where}.csv"
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.CSVLogger(log),
            buoy.keras.Guard(where, save=8),  # step 8 is in the second epoch: its row comes twice
            *([Interrupt(step)] if step else []),
        ]
        validation = {"validation_data": (X, Y), "validation_freq": 2}
        with redirect_stderr(StringIO()), suppress(StopHere):
            made.fit(X, Y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks, **validation)
        return Path(log).read_text()

    whole = training(f"{folder}-whole")
    cut = training(folder, step=12)

    assert cut.count("\n") == 3
    assert training(folder) == whole


def rows_in_a_csv_log_that_may_be_anothers_are_kept(folder: str) -> None:
    class Fileless(keras.callbacks.CSVLogger):  # type: ignore[misc]
        def __init__(self) -> None:
            keras.callbacks.Callback.__init__(self)

        on_train_begin = on_epoch_end = on_train_end = lambda *_, **__: None

    def training(where: str, loggers: Any, *more: Any) -> list[str]:
        guarded_fit._ended.clear()
        options = {"batch_size": 8, "epochs": 4, "verbose": 0}
        callbacks = [*loggers(where), buoy.keras.Guard(where, save=3), *more]
        with redirect_stderr(StringIO()), suppress(StopHere):
            plain().fit(X, Y, **options, callbacks=callbacks)
        return [row.split(",")[0] for row in Path(f"{where}.csv").read_text().splitlines()]

    def one(where: str) -> Any:
        return [keras.callbacks.CSVLogger(f"{where}.csv"), Fileless()]

    def added(where: str) -> Any:
        Path(f"{where}.other").write_text("epoch,loss,val_loss\n" + "".join(f"{n},1,2\n" for n in range(9)))
        return [keras.callbacks.CSVLogger(f"{where}.other", append=True), *one(where)]

    first, second = f"{folder}0", f"{folder}1"
    training(first, one, Interrupt(6))  # the checkpoint is in the first epoch, whose row comes after it
    with open(f"{first}.csv", "a") as file:
        file.write("0,5,5\n1,5,5\n")  # another run's
    training(second, one, Interrupt(6))
    training(second, added)

    assert training(first, one) == ["epoch", *"0010123"]
    assert Path(f"{second}.other").read_text().startswith("epoch,loss,val_loss\n0,1,2\n1,1,2\n")


def main(name: str, folder: str) -> None:
    globals()[name](folder)
