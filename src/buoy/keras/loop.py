"""`buoy.keras.Loop`: a training loop of one's own (GradientTape) that resumes where it was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras

from buoy._compat.keras import why_not
from buoy.checkpoint.retention import BestMetric, Keep
from buoy.checkpoint.saver import Receipt
from buoy.errors import UsageError
from buoy.flight.profile import Profiling
from buoy.keras.data import rng
from buoy.keras.data.epochs import Position
from buoy.keras.data.loader import Feed, feed_for, say_exactness
from buoy.keras.profile import Profile
from buoy.keras.state.tensors import as_tensor, to_tensor
from buoy.keras.state.tracked import (
    Beside,
    Stored,
    Tracked,
    refuse_others,
    stored_training,
    tracked,
    trains_along,
)
from buoy.keras.step.tape import Gradients
from buoy.training.manager import CheckpointManager
from buoy.training.messages import say
from buoy.training.options import Options, folder_name


class Loop:
    """Checkpoints for a loop over epochs and batches, and the way back to the same bits after any death.

        loop = buoy.keras.Loop("runs/cats")
        loop.track(model=model, optimizer=optimizer, loss=loss_metric)
        for epoch in loop.epochs(10):
            for x, y in loop.batches(dataset):
                train_step(x, y)

    A checkpoint is made between two batches, when one is due.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        mirror: str | None = None,
        time_limit: str | float | None = None,
        disk: str | None = None,
        save: str | int | None = None,
        keep: Keep | int | None = None,
        seed: int | None = None,
    ) -> None:
        if (why := why_not("resume")) is not None:
            raise UsageError(
                f"buoy.keras.Loop cannot be used: {why}",
                received=f"Keras {keras.__version__}",
                expected="a version that buoy knows",
                hint="another version of Keras, or of buoy; nothing was trained",
            )
        options = Options(
            mirror=mirror, time_limit=time_limit, disk=disk, save=save, keep=keep, seed=seed,
        )  # fmt: skip
        self._keeper = CheckpointManager(folder_name(folder), options)
        try:
            self._checkpoint = self._keeper.newest()
            stored = stored_training(self._checkpoint, "Loop")
        except BaseException:
            self._keeper.finish()
            raise
        self._data_state = stored["data"] if stored is not None else None
        self._position = Position.of(stored["position"]) if stored is not None else Position()
        self._seed = rng.run_seed(seed, stored)
        self._tracked: dict[str, Tracked] = {}
        self._steps: dict[str, Gradients] = {}
        self._objects: list[Any] = []
        self._warned_of_optimizer = False
        self._profiling = Profiling(say)
        self._feed: tuple[Any, Feed] | None = None
        self._watching = ExitStack()
        """Over who else reads the data."""
        self._metrics: dict[str, float] = {}
        self._best_metric = BestMetric(keep, say)
        self._epoch_began: dict[str, Any] | None = None
        """The random state with which the epoch that is under way was begun."""
        self._batches_left = False
        """The script has left its loop over this epoch's batches: what it saves now is the end of the epoch."""
        self.resumed = self._checkpoint is not None
        """Whether this attempt resumes from a checkpoint."""

    @property
    def step(self) -> int:
        """Batches of the run so far, the one whose body is under way included."""
        return self._position.step

    def track(self, **objects: Any) -> None:
        """Name what belongs to the run: built models, optimizers, metrics, variables, seed generators, what
        `buoy.keras.gradients` made; dicts, lists, arrays and RNGs are restored in place.

        On resume all of them are loaded at once, or none and an error that names what does not fit.
        """
        taken = [
            name for name in objects if name in {**self._tracked, **self._steps, "training": 0, "rng": 0}
        ]
        if taken:
            raise UsageError(f"the name {taken[0]!r} is taken", expected="a name of its own for each object")
        steps = {name: value for name, value in objects.items() if isinstance(value, Gradients)}
        new = {name: tracked(name, value) for name, value in objects.items() if name not in steps}
        if self._checkpoint is not None:
            stored = {name: self._found(name) for name in new}
            refuse_others(words for name, thing in new.items() for words in thing.mismatches(stored[name]))
            for name, thing in new.items():
                thing.load(stored[name])
                if isinstance(thing, Beside) and not thing.is_in(stored[name]):
                    say(
                        f"{name} is missing from the checkpoint of step {self.step}: it starts as the script built it"
                    )
        self._tracked.update(new)
        self._objects += objects.values()
        for name, step in steps.items():
            log = os.path.join(self._keeper.folder, f"micro-batches.{name}.jsonl")
            step.log_to(log, start_over=self._checkpoint is None)
            if self._checkpoint is not None and name in self._checkpoint.names:
                step.resume(self._stored(name))
        self._steps.update(steps)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`; the last checkpoint is made after the last one."""
        position = self._position
        if position.epoch >= count:
            say(f"training is already complete ({count} epochs, step {position.step})")
            self._keeper.finish()
            return
        if self.resumed:
            place = f"epoch {position.epoch + 1}" + (
                f", batch {position.batch + 1}" if position.batch else ""
            )
            say(f"resumed from step {position.step} ({place})")
        self._epoch_began = rng.capture()  # counted in what a checkpoint takes
        self._keeper.expect(self._items(), as_tensor)
        try:
            with self._keeper.loop():
                while position.epoch < count:
                    self._begin_epoch()
                    yield position.epoch
                    self._checkpoint = None  # also where the script reads its data in another way
                    self._best_metric.epoch_ends()
                    position.end_epoch()
                    self._batches_left = False
                    self._safe_point(finished=position.epoch == count)
        finally:
            self._watching.close()
            self._profiling.close()
            self._keeper.finish()

    def batches(self, dataset: Any) -> Iterator[Any]:
        """The batches that are left of this epoch: a tf.data.Dataset, a PyDataset, or (x, y) arrays in a Dataset."""
        position = self._position
        drawn = rng.capture() if self._checkpoint is not None else None
        feed = self._feed_of(dataset)
        position.number, position.offset = position.epoch, position.batch
        feed.epoch_begins(position.epoch, position.number, position.offset)
        iterator = feed.open(feed.dataset, position.number, position.offset)
        if drawn is not None:
            self._arrive(drawn)
        self._profiling.between_steps(position.step, self._new_profile)
        try:
            for batch in iterator:
                position.batch, position.offset = position.batch + 1, position.offset + 1
                position.step += 1
                yield batch
                self._safe_point()
        except BaseException:
            self._profiling.leave(None)  # whether the step was done, nobody can tell
            raise
        finally:
            self._batches_left = True
        feed.epoch_ends(position.epoch)

    def metric(self, **values: float) -> None:
        """Figures such as `val_loss=0.3`, stored with the next checkpoint."""
        self._metrics.update({name: float(value) for name, value in values.items()})
        self._best_metric.came(values, in_batch=not self._batches_left)

    def save(self, *, pin: str | None = None) -> Receipt:
        """Save now; belongs at the end of a batch's body or of an epoch's. `pin` keeps it for good, under that name."""
        before = self._position
        if self._batches_left:
            self._position = Position.of(before.as_dict())
            self._position.end_epoch()
        try:
            return self._save("user", pin=pin)
        finally:
            self._position = before

    def profile(self, steps: int = 3) -> None:
        """Hand the next steps to TensorFlow's profiler, then print where their time went and what holds memory.

        The first two steps are not measured: they warm up. Where the loop ends early, what there is is printed.
        The raw trace for TensorBoard is kept in `<folder>/profiles/`.
        """
        self._profiling.ask(steps)

    def _new_profile(self) -> Profile:
        models = [each for each in self._objects if isinstance(each, keras.layers.Layer)]
        optimizers = [each for each in self._objects if isinstance(each, keras.optimizers.Optimizer)]
        return Profile(self._keeper.folder, models, optimizers)

    def _begin_epoch(self) -> None:
        """After a resume the script draws on its way to the batches what it drew the first time."""
        if self._checkpoint is not None:
            began = self._stored("training").get("epoch_began")  # older checkpoints do not have it
            if self._position.batch == 0:
                rng.restore(self._stored("rng"))
            elif began is not None:
                rng.restore(began)
        self._epoch_began = rng.capture()

    def _arrive(self, drawn: dict[str, Any]) -> None:
        """The saved place; opening the data may have drawn, and `drawn` is what it was before that.

        In the middle of an epoch everything is loaded once more: a metric that was reset at its start, or a rate that
        was lowered, is in the checkpoint as it was when it was saved.
        """
        assert self._checkpoint is not None
        if self._position.batch:
            for name, thing in self._tracked.items():
                if (stored := self._found(name)) is not None:
                    thing.load(stored)
            drawn = self._stored("rng")
        rng.restore(drawn)
        self._checkpoint = None  # an open file keeps its disk space even when it is removed

    def _safe_point(self, finished: bool = False) -> None:
        reason = self._keeper.due(self._position.step) or ("finished" if finished else None)
        if reason is not None:
            self._save(reason, finished=finished)
            self._keeper.stop_if_asked()
        self._profiling.between_steps(self._position.step, self._new_profile)

    def _save(self, reason: str, *, pin: str | None = None, finished: bool = False) -> Receipt:
        metrics, self._metrics = self._metrics, {}
        if not self._warned_of_optimizer and trains_along(self._objects):
            self._warned_of_optimizer = True
            say("the optimizer of a tracked model trains it (train_on_batch) and is not tracked: it starts over after "
                "a resume; hint: `model.optimizer.build(model.trainable_variables)`, then "
                "`loop.track(optimizer=model.optimizer)`")  # fmt: skip
        return self._keeper.save(
            self._items(),
            step=self._position.step,
            epoch=self._position.epoch,
            reason=reason,
            metrics=metrics,
            pin=pin,
            finished=finished,
            as_tensor=as_tensor,
        )

    def _items(self) -> dict[str, Any]:
        data = self._feed[1].state(self._position.offset) if self._feed is not None else self._data_state
        training = {"by": "Loop", "position": self._position.as_dict(), "seed": self._seed, "data": data,
                    "epoch_began": self._epoch_began}  # fmt: skip
        held = {name: thing.state() for name, thing in self._tracked.items()}
        sizes = {name: step.state_dict() for name, step in self._steps.items()}
        return {**held, **sizes, "training": training, "rng": rng.capture()}

    def _feed_of(self, dataset: Any) -> Feed:
        if self._feed is not None and self._feed[0] is dataset:
            return self._feed[1]
        if self._feed is not None:
            raise UsageError(
                "a loop has one dataset to train on",
                received="another one",
                expected="the dataset of the first epoch",
                hint="evaluate on other data without `loop.batches`",
            )
        feed = feed_for(dataset, None, None, self._seed, say, shuffle=False)
        if self._data_state is not None:
            feed.load(self._data_state)
        say_exactness(feed.exactness, say)
        self._feed = dataset, feed
        self._watching.enter_context(feed.warn_of_others())
        return feed

    def _found(self, name: str) -> Stored | None:
        """What is stored under this name, to be read; None: nothing is."""
        assert self._checkpoint is not None
        return partial(self._checkpoint.value, name) if name in self._checkpoint.names else None

    def _stored(self, name: str) -> Any:
        assert self._checkpoint is not None
        return self._checkpoint.value(name, to_tensor)
