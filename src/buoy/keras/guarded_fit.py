"""One call of `model.fit` under a guard: its data, its checkpoints, and the way back to where it was killed.

The runs that this process has brought to their end itself: a further `fit` continues from what is in memory.

Only a new process, or another model or optimizer than the one that was trained, needs the checkpoint. Loading it over
a live training would take back whatever the script has drawn or changed between two calls of `fit`.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import keras

from buoy._compat.keras import (
    callbacks_catch_up,
    functions_in,
    loss_tracker_of,
    metrics_without_a_step,
    split_off_validation,
)
from buoy._compat.tensorflow import is_pipeline
from buoy.checkpoint.retention import BestMetric, Keep
from buoy.checkpoint.saver import Receipt
from buoy.checkpoint.store import Checkpoint
from buoy.errors import BuoyError, UsageError, trouble
from buoy.keras.data import rng
from buoy.keras.data.epochs import GuardedAdapter, Position, Validation
from buoy.keras.data.loader import (
    APPROXIMATE,
    BITWISE,
    SAME_DATA,
    Exactness,
    Feed,
    Say,
    feed_for,
    say_exactness,
)
from buoy.keras.data.pipeline import examine, hidden_draws
from buoy.keras.data.pydataset import NumberedValidation
from buoy.keras.profile import Profile
from buoy.keras.state import callbacks as memory
from buoy.keras.state import state_dict
from buoy.keras.state.tensors import Lent, as_tensor, to_tensor
from buoy.keras.state.tracked import Holdings, stored_training, trainable_flags
from buoy.machine import process
from buoy.training.manager import CheckpointManager
from buoy.training.messages import say

if TYPE_CHECKING:
    from buoy.keras.guard import Guard


@dataclass(frozen=True, slots=True)
class Ended:
    """The last `fit` of this process on a run folder."""

    token: str | None
    """Stands in each checkpoint that the fit made: a newest one with another token was made by somebody else."""
    trained: bool
    """False: the run was finished already, and its end was loaded."""
    rng: dict[str, Any]
    """The RNGs at that end: the script draws from them before the next `fit`."""
    cell: int | None
    model: weakref.ref[Any]
    optimizer: weakref.ref[Any] | None

    def is_in(self, model: Any) -> bool:
        """Whether this model, with its optimizer, is the one that has the state of that end."""
        optimizer = self.optimizer() if self.optimizer is not None else None
        is_model: bool = self.model() is model
        return is_model and model.optimizer is optimizer

    @property
    def is_of_this_script(self) -> bool:
        """Trained since the script, or the notebook's cell, began: what follows is no second start of it."""
        return self.trained and self.cell == process.running()


_ended: dict[str, Ended] = {}
os.register_at_fork(after_in_child=_ended.clear)  # the parent may continue the run


def ends(folder: str, model: Any, token: str | None, *, trained: bool) -> None:
    """The model holds the end of the run now."""
    optimizer = weakref.ref(model.optimizer) if model.optimizer is not None else None
    _ended[folder] = Ended(token, trained, rng.capture(), process.running(), weakref.ref(model), optimizer)


_FEEDS = {
    "ArrayFeed": "arrays in memory",
    "PipelineFeed": "a tf.data.Dataset",
    "PyDatasetFeed": "a keras.utils.PyDataset",
    "ReplayedFeed": "a generator or another iterable",
}
"""What a user calls them."""


_AS_THE_SCRIPT_SETS = (
    "a resumed training starts with the layers as the script sets them; hint: decide by the epoch's number in "
    "`on_epoch_begin`, and call `model.make_train_function(force=True)` after it"
)


class GuardedFit:
    """One call of `fit` under a guard."""

    def __init__(self, guard: Guard, keeper: CheckpointManager, arguments: dict[str, Any]) -> None:
        self._guard, self._keeper, self._arguments = guard, keeper, arguments
        self._model = arguments["self"]
        self._holdings = Holdings(self._model)
        self._checkpoint: Checkpoint | None = keeper.newest()
        stored = stored_training(self._checkpoint, "Guard")
        self._before = _ended.get(keeper.folder)
        self._is_live = stored is not None and self._goes_on_from_memory(stored)
        self._token = os.urandom(8).hex()
        """Stands in every checkpoint of this `fit`; not from the RNGs of the training."""
        self._rng_before = self._before.rng if self._is_live and self._before is not None else None
        """At the end of the `fit` before this one, of the same run."""
        self.resumed = stored is not None and not self._is_live
        with self._reading("what the Guard kept of itself"):
            self._seed = rng.run_seed(guard.options.seed, stored)
            place = Position.of(stored["position"]) if stored else None
        self._feed: Feed = _feed_of(arguments, self._seed, say)
        self._exactness = self._feed.exactness
        position = place or Position(epoch=arguments["initial_epoch"])
        self.adapter = GuardedAdapter(self._feed, position, self._between_steps)
        self._callbacks = _callbacks_beside(guard, arguments)
        self._memory = memory.Memory(self._callbacks, say)
        self._list: Any = None
        self._holdings.build(self._feed.dataset.element_spec)
        self._flags = trainable_flags(self._model)
        self._warned_of_thaw = False
        self._resume_inside = False
        self._places = self._holdings.places_in_weights_file()
        self._validation: Any = _validation_of(arguments, self._seed, say)
        if stored is not None:
            self._resume(stored)
        elif (unbuilt := self._holdings.unbuilt()) is not None:
            say(unbuilt)
        event = partial(keeper.recorder.event, path=keeper.folder)  # a kernel trains several runs
        self._transaction = _install_transaction(self._model, guard.step_options, event, say)
        if self._transaction is not None:
            log = os.path.join(keeper.folder, "micro-batches.jsonl")
            self._transaction.log_to(log, start_over=self._checkpoint is None)
            if self._checkpoint is not None and "micro_batch" in self._checkpoint.names:
                with self._reading("what was saved of its micro-batches"):
                    self._transaction.resume(self._stored("micro_batch"))
        self._best_metric = BestMetric(guard.options.keep, say)
        self._model_was_read = self._said_trouble = False
        self.wish: tuple[str, str | None] | None = None
        """(reason, name to pin it under) of a checkpoint to make after this batch."""
        say_exactness(self._exactness, say)

    def run(self, original: Callable[..., Any]) -> Any:
        """Keras's own `fit`, over our data."""
        position = self.adapter.position
        stored = stored_training(self._checkpoint, "Guard")
        if stored is not None and self._nothing_to_train(stored):
            return self._trains_nothing(stored)
        _ended.pop(self._keeper.folder, None)  # a training that does not come to its end is resumed
        self._keeper.expect(self._items(), as_tensor)
        self._is_finite()  # what every checkpoint asks: a run that can keep none must end before its first step
        arguments = {
            **self._arguments, "x": self.adapter, "y": None, "sample_weight": None, "class_weight": None,
            "shuffle": False, "initial_epoch": position.epoch, "callbacks": self._callback_list(),
        }  # fmt: skip
        with metrics_without_a_step(self._model), self._feed.warn_of_others():
            return original(**arguments)

    def close(self) -> None:
        """Leave the model as it was found."""
        self._guard.profiling.close()
        if self._transaction is not None:
            self._transaction.remove()
        if self._validation is not None:
            self._validation.forget()

    # -- what Keras calls ---------------------------------------------------------------------------------------

    def training_begins(self) -> None:
        """Everybody else has begun, and forgotten: give them their memory back."""
        self._memory.training_begins()
        if self._checkpoint is not None:
            for words in self._remind():
                say(words)

    def epoch_begins(self) -> None:
        """In the middle of an epoch everything is loaded once more: metrics were reset, schedules may have acted."""
        position = self.adapter.position
        self._keeper.epoch_begins(
            position.epoch, self._arguments["epochs"], position.step, is_whole=not self._resume_inside
        )
        if self._resume_inside:
            self._resume_inside = False
            self._load_state()
            self._remind()
        self._checkpoint = None  # an open file keeps its disk space even when it is removed
        self._guard.profiling.between_steps(self.adapter.position.step, self._new_profile)

    def epoch_ends(self, logs: dict[str, Any]) -> None:
        """The position moves to the next epoch first: what is saved now begins there."""
        self.adapter.epoch_is_over()
        self._best_metric.came(_metrics_of(logs))
        self._best_metric.epoch_ends()
        reason = self._keeper.due(self.adapter.position.step)
        if reason is None and self._keeps_best():
            reason = "epoch"
        if reason is not None:
            self._try_to_save(reason, metrics=_metrics_of(logs))

    def training_ends(self, logs: dict[str, Any]) -> None:
        """After the other callbacks had their last word, and Keras its averaged weights."""
        self._try_to_save("finished", metrics=_metrics_of(logs), finished=True)
        ends(self._keeper.folder, self._model, self._token, trained=True)

    def _between_steps(self) -> None:
        if not self._model_was_read:
            self._read_model()
        reason, pin = self.wish or (self._keeper.due(self.adapter.position.step), None)
        self.wish = None
        if reason is not None:
            self._try_to_save(reason, pin=pin)
        self._guard.profiling.between_steps(self.adapter.position.step, self._new_profile)

    def _new_profile(self) -> Profile:
        return Profile(self._keeper.folder, [self._model], [self._model.optimizer])

    def _try_to_save(self, reason: str, **more: Any) -> None:
        """A checkpoint that cannot be made must not end the training; the one before stands."""
        try:
            self.save(reason, **more)
        except Exception as error:  # noqa: BLE001 - a callback's own state_dict may raise anything
            words = f"step {self.adapter.position.step} was not saved; training continues: {error}"
            self._keeper.recorder.event("trouble", what=words)
            if not self._said_trouble:
                say(words)
            self._said_trouble = True
        self._keeper.stop_if_asked()

    def _read_model(self) -> None:
        """After the first step, when its graph is there: does the model draw numbers that nobody can save?"""
        self._model_was_read = True
        try:
            traced = self._transaction.traced() if self._transaction is not None else None
            drawn = hidden_draws(functions_in(self._model.train_function) if traced is None else traced)
        except Exception as error:  # noqa: BLE001 - another version of TensorFlow keeps its graphs elsewhere
            trouble("whether the training step draws", error)
            return
        if drawn and self._exactness.grade == BITWISE:
            self._exactness = Exactness(
                SAME_DATA,
                f"the training step draws from TensorFlow's hidden RNGs ({drawn[0]}), which cannot be saved",
                "use keras.random with a keras.random.SeedGenerator kept in the layer",
            )
            say_exactness(self._exactness, say)

    # -- saving -----------------------------------------------------------------------------------------------

    def save(
        self,
        reason: str,
        *,
        metrics: dict[str, float] | None = None,
        pin: str | None = None,
        finished: bool = False,
    ) -> Receipt:
        """Hand everything over to the keeper."""
        # Callbacks that run beside the training catch up first.
        callbacks_catch_up(self._list)
        return self._keeper.save(
            self._items(finished),
            step=self.adapter.position.step,
            epoch=self.adapter.position.epoch,
            reason=reason,
            metrics=metrics,
            pin=pin,
            finished=finished,
            finite=self._is_finite(),
            as_tensor=as_tensor,
        )

    def _is_finite(self) -> bool | None:
        """Whether the mean loss of this epoch is a finite number; None before its first step."""
        tracker = loss_tracker_of(self._model)
        if tracker is None or not any(_numbers(tracker.count)):
            return None
        return all(map(isfinite, _numbers(tracker.total)))

    def _items(self, finished: bool = False) -> dict[str, Any]:
        position, exactness = self.adapter.position, self._exactness
        if self._feed.exactness.grade == APPROXIMATE:
            exactness = self._feed.exactness  # found out on the way
        training = {
            "by": "Guard",
            "token": self._token,
            "position": position.as_dict(),
            "epochs": self._arguments["epochs"],
            "finished": finished,
            "stopped": bool(getattr(self._model, "stop_training", False)),
            "seed": self._seed,
            "data": {"kind": type(self._feed).__name__, "state": self._feed.state(position.offset)},
            "validation": self._validation.state() if self._validation is not None else None,
            "callbacks": self._memory.state(),
            "frozen": self._changed_flags(),
            "weights_file": self._places,
            "exactness": {"grade": exactness.grade, "reason": exactness.reason},
        }
        items = {**self._holdings.items(), "training": training, "rng": rng.capture()}
        if self._rng_before is not None:
            items["rng_before"] = self._rng_before
        if self._transaction is not None:
            items["micro_batch"] = self._transaction.state_dict()
        return items

    def _changed_flags(self) -> list[bool]:
        """The `trainable` of every layer, where a callback has changed what the script set; else nothing."""
        now = trainable_flags(self._model)
        if now == self._flags:
            return []
        if not self._warned_of_thaw:
            self._warned_of_thaw = True
            say(f"a callback froze or unfroze layers, which a resume does not restore: {_AS_THE_SCRIPT_SETS}")
        return now

    # -- resuming ---------------------------------------------------------------------------------------------

    def _resume(self, stored: dict[str, Any]) -> None:
        assert self._checkpoint is not None
        data = stored["data"]
        if data["kind"] != type(self._feed).__name__:
            raise UsageError(
                "this run was trained on another kind of data",
                received=_FEEDS.get(type(self._feed).__name__, type(self._feed).__name__),
                expected=_FEEDS.get(data["kind"], str(data["kind"])) + ", as in the checkpoint",
                hint="give this training a folder of its own",
            )
        self._feed.load(data["state"])
        self._exactness = self._feed.exactness
        if self._validation is not None and type(stored["validation"]) is type(self._validation.state()):
            self._validation.catch_up(stored["validation"], is_live=self._is_live)
        position = self.adapter.position
        memory.append_logs(self._callbacks)
        if self._is_live:
            position.epoch = max(position.epoch, self._arguments["initial_epoch"])
            return
        if "rng_before" in self._checkpoint.names:
            self._rng_before = self._stored("rng_before")
        for words in self._load_state():
            say(words)
        self._resume_inside = position.batch > 0
        if not self._nothing_to_train(stored):
            memory.drop_rows_to_come(self._callbacks, stored["callbacks"], position.epoch)
            say(f"resumed from step {position.step} ({self._place()})")

    def _goes_on_from_memory(self, stored: dict[str, Any]) -> bool:
        """Whether the model itself is where the run is: nothing is loaded over it, nor over what the script drew."""
        before, token = self._before, stored.get("token")
        return (
            before is not None and token is not None and before.token == token and before.is_in(self._model)
        )

    def _place(self) -> str:
        """The batch that comes next, in words."""
        position = self.adapter.position
        per_epoch = self._arguments["steps_per_epoch"] or self._feed.batches
        if not position.batch:
            return f"epoch {position.epoch + 1}"
        if position.batch == per_epoch:
            return f"epoch {position.epoch + 1}, at its end"
        return f"epoch {position.epoch + 1}, batch {position.batch + 1}"

    def _load_state(self) -> list[str]:
        """Returns what starts over, in words."""
        assert self._checkpoint is not None
        names = [
            name for name in self._checkpoint.names if name == "model" or name.startswith(("optim", "metr"))
        ]
        value = self._checkpoint.value
        with self._reading("what was saved of the model"):
            anew = self._holdings.load({name: value(name, Lent) for name in names})  # type: ignore[misc]
            frozen = self._stored("training").get("frozen") or self._flags
        if frozen != self._flags:
            anew.append(
                f"a callback had frozen or unfrozen layers before this checkpoint: {_AS_THE_SCRIPT_SETS}"
            )
        return anew

    def _remind(self) -> list[str]:
        """Callbacks and RNGs, as they were; returns what found no owner, in words."""
        if not self._is_live:
            with self._reading("the state of the random numbers"):
                rng.restore(self._stored("rng"))
        return self._memory.load(self._stored("training")["callbacks"], is_live=self._is_live)

    def _reading(self, what: str) -> AbstractContextManager[None]:
        """For code that uses what was saved: somebody may have written something else there."""
        return self._checkpoint.reading(what) if self._checkpoint is not None else nullcontext()

    def _stored(self, name: str) -> Any:
        assert self._checkpoint is not None
        return self._checkpoint.value(name, to_tensor)

    # -- nothing to do ----------------------------------------------------------------------------------------

    def _nothing_to_train(self, stored: dict[str, Any]) -> bool:
        """All epochs asked for are done and ended, or a callback had ended the training before."""
        epochs = self._arguments["epochs"]
        was_ended = stored["finished"] or stored["epochs"] > epochs  # else `on_train_end` is still to come
        stopped = stored["finished"] and stored["stopped"] and epochs <= stored["epochs"]
        return bool(stopped or (was_ended and self.adapter.position.epoch >= epochs))

    def _trains_nothing(self, stored: dict[str, Any]) -> Any:
        """`fit` returns at once: in a script that is started again that is right, within one it is a mistake."""
        before, asked = self._before, self._arguments
        if before is not None and before.is_of_this_script and asked["epochs"] > asked["initial_epoch"]:
            raise self._would_train_nothing()
        self._memory.load(stored["callbacks"], is_live=self._is_live)
        if before is None or not before.trained or not self._is_live:
            # What comes after `fit` draws as it did the first time; a checkpoint of a later `fit` knows it too.
            later = None if stored["finished"] else self._rng_before
            rng.restore(later or self._stored("rng"))
        if stored["finished"] and not self._is_live:
            position = self.adapter.position
            self._feed.close(position.epoch, position.number, position.offset)
            ends(self._keeper.folder, self._model, stored.get("token"), trained=False)
        history = next(each for each in self._callbacks if isinstance(each, keras.callbacks.History))
        history.set_model(self._model)
        history.set_params({"verbose": 0, "epochs": stored["epochs"], "steps": self._feed.batches})
        self._model.history = history
        say(self._done_already(stored))
        return history

    def _would_train_nothing(self) -> UsageError:
        done = self.adapter.position.epoch
        return UsageError(
            f"this `fit` would train nothing: {self._guard.folder} has {_epochs(done)} already, trained by this script",
            received=f"epochs={self._arguments['epochs']}, initial_epoch={self._arguments['initial_epoch']}",
            expected=f"more than {done} in `epochs`, which counts from the beginning of the run",
            hint=f"to train one more epoch: `fit(..., epochs={done + 1}, initial_epoch={done})`, in a loop "
            "`epochs=epoch + 1, initial_epoch=epoch`; another training needs a folder of its own",
        )

    def _done_already(self, stored: dict[str, Any]) -> str:
        position, folder = self.adapter.position, self._guard.folder
        if stored["finished"] and not position.batch:
            return (
                f"{folder} is finished: {_epochs(position.epoch)}, {position.step:,} steps; the model has its "
                "final weights, this `fit` trains nothing. Ask for more epochs to train further; "
                "another training needs a folder of its own"
            )
        return (
            f"{_listed(self._arguments['initial_epoch'], self._arguments['epochs'])} done already, this `fit` "
            f"trains nothing: the checkpoint of {folder} is further on, after step {position.step} in {self._place()}"
        )

    # -- what `fit` was given ---------------------------------------------------------------------------------

    def _callback_list(self) -> Any:
        verbose = self._arguments["verbose"]
        self._list = keras.callbacks.CallbackList(
            [*self._callbacks, self._guard],
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=self._arguments["epochs"],
            steps=self._arguments["steps_per_epoch"] or self._feed.batches,
            model=self._model,
        )
        return self._list

    def _keeps_best(self) -> bool:
        keep = self._guard.options.keep
        return isinstance(keep, Keep) and keep.best is not None


def _numbers(variable: Any) -> list[float]:
    """A variable's value; of a distributed one each replica's."""
    return [float(part.numpy()) for part in state_dict.state_of(variable).values()]


def _epochs(count: int) -> str:
    return f"{count} epoch{'' if count == 1 else 's'}"


def _listed(first: int, end: int) -> str:
    """The epochs from `first` up to `end`, as users count them, with their verb."""
    if end - first <= 1:
        return f"epoch {end} is"
    return f"epochs {first + 1} {'and' if end - first == 2 else 'to'} {end} are"


# -- what `fit` was given -----------------------------------------------------------------------------------------


def flat(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` was given, in whatever form."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks))


def _feed_of(arguments: dict[str, Any], seed: int, say: Say) -> Feed:
    """The data as a feed. A validation split is made here, as Keras would: afterwards the arrays are out of sight."""
    x, y, sample_weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    if arguments["validation_split"] and arguments["validation_data"] is None:
        (x, y, sample_weight), arguments["validation_data"] = split_off_validation(
            (x, y, sample_weight), arguments["validation_split"]
        )
        arguments["validation_split"] = 0.0
    names = ("batch_size", "steps_per_epoch", "shuffle", "class_weight")
    return feed_for(x, y, sample_weight, seed, say, **{name: arguments[name] for name in names})


def _validation_of(arguments: dict[str, Any], seed: int, say: Say) -> Validation | NumberedValidation | None:
    """What remembers where the evaluations are; None: arrays, which are the same each time, or nothing."""
    data = arguments["validation_data"]
    if isinstance(data, keras.utils.PyDataset):
        validation = NumberedValidation(data, seed, say)
        arguments["validation_data"] = validation.dataset
        _warn_of_validation(validation.dataset.exactness, say)
        return validation
    if isinstance(data, types.GeneratorType):
        # Each evaluation reads it anew from wherever the threads of the one before had got to.
        say(
            "a resume will not validate bit for bit: Keras reads a generator in validation_data ahead, as far as time "
            "allows, and loses that; hint: validate on arrays, a tf.data.Dataset or a keras.utils.PyDataset"
        )
        return None
    if not hasattr(data, "element_spec"):
        return None
    if is_pipeline(data):  # not one that a strategy has distributed already
        _warn_of_validation(examine(data), say)
    return Validation(data)


def _warn_of_validation(found: Exactness, say: Say) -> None:
    if found.grade != BITWISE:
        reason = found.reason.partition(": ")[0]  # what follows is what a training makes of it
        say(f"a resume will not validate bit for bit: {reason}; hint: {found.hint}")


def _callbacks_beside(guard: Any, arguments: dict[str, Any]) -> list[Any]:
    """Everybody but the guard, with a History among them: at the guard's turn all of them have done what they do."""
    others = [each for each in flat(arguments["callbacks"]) if each is not guard]
    memory.refuse_rivals(others)
    if not any(isinstance(each, keras.callbacks.History) for each in others):
        others.append(keras.callbacks.History())
    return others


def _install_transaction(model: Any, options: dict[str, Any], event: Any, say: Say) -> Any:
    """The two-phase step with micro-batches; a model that it does not fit trains as ever, and a message says why."""
    from buoy.keras.step import transaction  # a Keras without its names has no micro-batches

    try:
        return transaction.install(model, say=say, event=event, **options)
    except BuoyError as error:
        if options["micro_batch"] is not None:
            raise
        say(f"steps are not split when memory runs out: {error.message}")
        return None


def _metrics_of(logs: dict[str, Any]) -> dict[str, float]:
    """The metrics of an epoch that are single numbers."""
    return {name: float(value) for name, value in logs.items() if getattr(value, "shape", ()) == ()}
