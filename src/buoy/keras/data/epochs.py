"""Between Keras's epoch loop and a feed: epochs that begin in their middle, and a safe point after each step.

Keras lets a data adapter of one's own be given as `x`, and walks it with an `EpochIterator`. The one hook here
wraps that walk, for our adapter only: iterators come from the feed, the steps before the position are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from buoy._compat.keras import (
    DataAdapter,
    dataset_of,
    forget_batches_ahead,
    iterate_instead,
    seen_before,
    source_of,
    walk_epochs_by,
)
from buoy.keras.data.loader import Feed
from buoy.keras.data.pipeline import ours


@dataclass
class Position:
    """Where a training is: the epoch and its batches for users, the pass and its batches for the data."""

    epoch: int = 0
    batch: int = 0
    number: int = 0
    offset: int = 0
    step: int = 0
    """Batches trained since the run began."""

    def end_epoch(self, *, new_pass: bool = True) -> None:
        """The next epoch begins with its first batch; mostly in a pass of its own."""
        self.epoch, self.batch = self.epoch + 1, 0
        if new_pass:
            self.number, self.offset = self.epoch, 0

    def as_dict(self) -> dict[str, int]:
        """For the checkpoint."""
        values = asdict(self)
        return {"pass": values.pop("number"), **values}

    @classmethod
    def of(cls, stored: dict[str, int]) -> Position:
        """From the checkpoint."""
        return cls(stored["epoch"], stored["batch"], stored["pass"], stored["offset"], stored["step"])


class GuardedAdapter(DataAdapter):  # type: ignore[misc]
    """A feed as Keras wants it, begun at a position."""

    def __init__(self, feed: Feed, position: Position, between_steps: Callable[[], None]) -> None:
        teach_epochs()
        self.feed = feed
        self.position = position
        self._between_steps = between_steps
        self._started = False
        self._iterator: Any = None
        self._of_epoch = -1
        self._stepped = False  # under tf.distribute Keras opens the data once before it begins
        self._pass_per_epoch = True
        self.in_step = False
        """A batch has been handed out, and the position does not count it yet."""

    def get_tf_dataset(self) -> Any:
        """The feed's."""
        return self.feed.dataset

    @property
    def num_batches(self) -> int | None:
        """The feed's, for a whole pass."""
        return self.feed.batches

    @property
    def batch_size(self) -> int | None:
        """Keras asks nobody."""
        return None

    def on_epoch_begin(self) -> None:
        """Called by Keras before the first iterator of the epoch."""
        self._started = True
        self._of_epoch = -1
        position = self.position
        if self._pass_per_epoch:
            position.number, position.offset = position.epoch, position.batch
        self.feed.epoch_begins(position.epoch, position.number, position.offset)

    def on_epoch_end(self) -> None:
        """Called by Keras after each epoch, and once before the first."""
        self.feed.epoch_ends(self.position.epoch if self._started else -1)

    def epoch_is_over(self) -> None:
        """The next epoch begins with its first batch; without `steps_per_epoch` also with a new pass."""
        self.position.end_epoch(new_pass=self._pass_per_epoch)

    def walk(self, epochs: Any, original: Iterator[Any]) -> Iterator[Any]:
        """Keras's own walk through an epoch, from the position on."""
        position, many = self.position, int(epochs.steps_per_execution)
        self._pass_per_epoch = epochs.steps_per_epoch is None
        iterate_instead(epochs, _Source(lambda: self._open(epochs)))
        before = -(-position.batch // many)  # executions made by the attempt before
        for number, item in enumerate(original):
            if number < before:
                continue
            if number == before:
                seen_before(epochs, position.offset + many)
            self.in_step = True
            yield item
            self.in_step, self._stepped = False, True
            made = many
            if self.feed.batches is not None:
                made = min(many, self.feed.batches - position.offset)
            position.batch += made
            position.offset += made
            position.step += made
            self._between_steps()

    def _open(self, epochs: Any) -> Any:
        """Keras makes an iterator at the end of a pass and, without `steps_per_epoch`, again when an epoch begins."""
        position = self.position
        if self._pass_per_epoch:
            if self._of_epoch == position.epoch and self._iterator is not None:
                return self._iterator  # the one at the end: nobody reads it
            self._of_epoch = position.epoch
        elif self._stepped:
            position.number, position.offset = position.number + 1, 0
        self._iterator = self.feed.open(source_of(epochs), position.number, position.offset)
        return self._iterator


class Validation:
    """Counts how often Keras opens and reads a validation set: each time moves the seeds of its shuffles on.

    Generators in variables, which its functions draw from, are saved as they are.
    """

    def __init__(self, dataset: Any) -> None:
        from buoy.keras.data.pipeline import shuffles_of, variables_of

        teach_epochs()
        self._dataset = dataset
        self._variables = variables_of(dataset)
        self._shuffles = shuffles_of(dataset)
        # The shuffle draws, whatever a cell makes of it anew.
        self._here = _evaluated.setdefault(self._shuffles[0].node if self._shuffles else dataset, [0, 0])
        """What this process has made and read of it, in this `fit` and before, for this model and for others."""
        _counted[id(dataset)] = self

    def state(self) -> list[Any]:
        """For the checkpoint."""
        return [*self._here, [variable.numpy() for variable in self._variables]]

    def catch_up(self, state: list[Any], *, is_live: bool = False) -> None:
        """Draw as many seeds as the attempts before; `is_live`: they were in this process, which has drawn them."""
        made, read, *values = state
        if not is_live:
            for variable, value in zip(self._variables, values[0] if values else (), strict=False):
                variable.assign(value)
        made, read = max(0, made - self._here[0]), max(0, read - self._here[1])
        self._here[:] = self._here[0] + made, self._here[1] + read
        with ours():
            for shuffle in self._shuffles:
                shuffle.advance(made, read)

    def begin(self, source: Any) -> Any:
        """An evaluation begins; the source is the dataset, maybe distributed."""
        self._here[1] += 1
        return _Source(lambda: self._iterate(source))

    def forget(self) -> None:
        """Count no more."""
        _counted.pop(id(self._dataset), None)

    def _iterate(self, source: Any) -> Any:
        self._here[0] += 1
        with ours():
            return iter(source)


_counted: dict[int, Validation] = {}
_evaluated: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""Of each validation set that this process evaluated on: iterators made, and read."""


class _Source:
    """Something whose iterator is made by a function."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Any:
        return self._make()


def teach_epochs() -> None:
    """Let Keras's epoch iterator ask us about our data; once per process, and of no effect on any other data."""
    walk_epochs_by(_walk)


def _walk(epochs: Any, original: Iterator[Any]) -> Iterator[Any]:
    adapter = epochs.data_adapter
    if isinstance(adapter, GuardedAdapter):
        return adapter.walk(epochs, original)
    evaluated = dataset_of(adapter)
    if getattr(type(evaluated), "is_buoys", False):
        evaluated.begin_evaluation()
        forget_batches_ahead(adapter)  # with `validation_steps` threads have made more than was read
    validation = _counted.get(id(evaluated))
    if validation is not None:
        iterate_instead(epochs, validation.begin(source_of(epochs)))
    return original
