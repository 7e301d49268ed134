"""tf.data pipelines: opened at a position by drawing the seeds that were drawn before, then reading again.

What a pass of a pipeline yields depends on three things, measured with TensorFlow 2.21:
- `shuffle` draws the seeds of a pass when its iterator is *made*, which for one above another shuffle is when the
  first element is read. All iterators of a shuffle draw from one source: making one of the shuffle alone, and not
  reading it, is enough to have the next pass in its own order.
- random ops in a `map` (`tf.random.uniform`) begin anew with every iterator.
- generators kept in variables (`tf.random.Generator`, the seed of a Keras layer) go on from pass to pass: their
  values at the beginning of the pass are kept in the checkpoint.
In a parallel `map` the last two are drawn in the order of the threads: nobody can repeat that.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from buoy.keras.data import APPROXIMATE, Exactness, Replay, Say
from buoy.keras.foreign_reads import ours, watch
from buoy.keras.pipeline_reading import examine, is_reshuffling, seeds_of, shuffles_of, variables_of

_walked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Passes that guarded trainings of this process made: a further one over the same pipeline finds their seeds drawn."""


class PipelineFeed:
    """A tf.data.Dataset, walked pass by pass."""

    def __init__(self, dataset: Any, batches: int | None, say: Say) -> None:
        self.dataset = dataset
        self.batches = batches
        self.exactness = examine(dataset)
        self._say = say
        self._shuffles = shuffles_of(dataset)
        # The shuffle draws, whatever Keras or a cell makes of it anew (`class_weight`, `.batch(32)`).
        self._drawn_by = self._shuffles[0].node if self._shuffles else dataset
        self._before = _walked.get(self._drawn_by, 0)
        """Passes that other trainings had made of it when this one began; a new process may find them not made."""
        self._seeds = seeds_of(dataset)
        self._variables = variables_of(dataset)
        self._begun: list[Any] = []
        self._stored: list[Any] = []
        self._was_opened = False

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """The iterator of this pass, after reading `offset` batches of it."""
        # A strategy over several devices opens it twice.
        if not self._was_opened and _walked.get(self._drawn_by, 0) > self._before + number:
            self._tell_of_another_order(offset)
        self._was_opened = True
        self._pass_by(number)
        _walked[self._drawn_by] = self._before + number + 1
        self._begun = [variable.numpy() for variable in self._variables]
        with ours():
            iterator = iter(dataset)
        if offset:
            with Replay(offset, "the input pipeline", self._say):
                skip(iterator, offset)
        return iterator

    def tell_of_others(self) -> Any:
        """Within it, say so once when somebody else has this pipeline shuffled: no checkpoint knows of that."""
        moving = [each.node for each in self._shuffles if is_reshuffling(each.node)]
        return watch(moving, self._read_by_another)

    def _read_by_another(self) -> bool:
        if not self._was_opened:
            return False  # before the first batch: every start comes by there
        self.exactness = Exactness(
            APPROXIMATE,
            "something beside the training, such as a callback, reads the shuffled training data too, which shuffles "
            "its later epochs otherwise; after a resume that is not made again",
            "give the callback a dataset of its own, not made from the one that is trained on",
        )
        self._say(f"not bit for bit after a resume: {self.exactness.reason}; hint: {self.exactness.hint}")
        return True

    def _tell_of_another_order(self, offset: int) -> None:
        """A notebook's cell that was stopped is run again: what a shuffle has drawn, it does not draw once more."""
        if any(is_reshuffling(shuffle.node) for shuffle in self._shuffles):
            what = ": some samples of this epoch come twice and some not at all" if offset else ""
            self._say(
                "not bit for bit: the pipeline was shuffled for this epoch already, in an earlier fit, and goes on in "
                f"another order{what}; hint: make the dataset in the cell that trains, before `fit`"
            )

    def close(self, epoch: int, number: int, offset: int) -> None:
        """What comes after this training finds the pipeline as it left it."""
        self._pass_by(number + bool(offset))

    def _pass_by(self, number: int) -> None:
        """To where pass `number` begins: the seeds of those before are drawn, variables are as they were."""
        passed = self._before + number - _walked.get(self._drawn_by, 0)
        with ours():
            for shuffle in self._shuffles:
                shuffle.advance(made=max(0, passed), read=max(0, passed))
        _walked[self._drawn_by] = self._before + number
        for variable, value in zip(self._variables, self._stored, strict=False):
            variable.assign(value)
        self._stored = []

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """Nothing to do."""

    def epoch_ends(self, epoch: int) -> None:
        """Nothing to do."""

    def state(self, offset: int) -> dict[str, Any]:
        """The seeds, to compare; and what generators in variables were worth when this pass began."""
        values = self._begun if offset else [variable.numpy() for variable in self._variables]
        return {"seeds": self._seeds, "variables": values, "before": self._before}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the values at the beginning of the pass; other seeds mean another order."""
        self._stored = list(state["variables"])
        self._before = state.get("before", 0)
        if state["seeds"] != self._seeds and self.exactness.grade != APPROXIMATE:
            self.exactness = Exactness(
                APPROXIMATE,
                "the pipeline shuffles with other seeds than the attempt before",
                "call keras.utils.set_random_seed(...) before the pipeline is made, and change nothing above it",
            )


@tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
def _skip_in_graph(iterator: Any, count: Any) -> None:
    for _ in tf.range(count):
        iterator.get_next()


def skip(iterator: Any, count: int) -> None:
    """Read so many batches and drop them; fewer when there are fewer."""
    try:
        if isinstance(iterator, tf.data.Iterator):
            _skip_in_graph(iterator, tf.constant(count))
        else:
            for _ in range(count):
                iterator.get_next()
    except tf.errors.OutOfRangeError:
        pass  # fewer batches than before: the training loop will see the end itself
