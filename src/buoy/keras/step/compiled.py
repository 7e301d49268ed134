"""A compiled step that can be rehearsed, split and repeated: what those of `fit` and of `buoy.keras.gradients` share.

Built once per `compile`, traced when first needed. Whether it may be split is asked before the first split, and again
at the 1st, 2nd, 4th... split of each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from buoy.keras.exactness.probe import Finding, Try, ask_later, probe, probe_many
from buoy.keras.exactness.samples import AGAIN, FIRST, Comparisons, kind_of, most_of, trials_of
from buoy.keras.memory.device import Memory
from buoy.keras.step import batch_norm, rehearsal
from buoy.keras.step.explain import refuse_stateful, refuse_uneven, too_big
from buoy.keras.step.gradient import Shape
from buoy.keras.step.snapshot import States
from buoy.microbatch.errors import OutOfMemory


class CompiledStep(ABC):
    """What `Retry` repeats (a `transaction.Step`), as far as both kinds have it in common."""

    computed = 0
    """How far a step comes that is rehearsed: all is computed, and nothing is written."""

    def __init__(self, model: Any, inexact: tuple[str, ...]) -> None:
        self._model, self._inexact = model, inexact
        self._states = States(model)
        self._stage = tf.Variable(0, dtype=tf.int64, trainable=False, name="buoy_stage")
        """Grows with each step by two, in one or two moves."""
        self._begun = 0
        self._memory: Memory | None = None
        self._comparisons = Comparisons()
        self._many_seen = False
        self._reading = (False, False)
        """Which losses that nobody can see into are sums: scalar ones, added ones."""
        self._forget()

    def _forget(self) -> None:
        """Drop everything that was traced."""
        self._whole: Any = self._compiled_whole()
        self._split: Any = None
        self._attempt: Try | None = None
        self._rehearsal = rehearsal.Rehearsal()

    # -- what each of them is ---------------------------------------------------------------------------------

    @abstractmethod
    def compute_whole(self, data: Any, room: Any) -> Any:
        """The step on the whole batch, as a graph; writes once there is room for an array of this shape."""

    @abstractmethod
    def compute_split(self, data: Any, room: Any, count: Any) -> Any:
        """The same in micro-batches."""

    @abstractmethod
    def _compiled_whole(self) -> Any:
        """`compute_whole` as a function."""

    @abstractmethod
    def _build(self, data: Any) -> None:
        """Make what is made once."""

    @abstractmethod
    def _look(self, few: Any) -> Shape:
        """Trace one micro-batch; what it looks like, and what else it writes in `_written`."""

    @abstractmethod
    def _new_attempt(self) -> Try:
        """What computes a few samples, for a comparison."""

    @abstractmethod
    def _exact(self, data: Any) -> Any:
        """The arrays of a batch as they are; None where one has no shape."""

    @property
    @abstractmethod
    def _written(self) -> list[Any] | None:
        """The variables that a step writes beside the weights, once one was traced."""

    def _trial(self) -> AbstractContextManager[None]:
        """In force while a few samples are compared."""
        return nullcontext()

    def _unknown(self) -> tuple[bool, bool]:
        """Whether it must be found out what scalar and added losses are: sums or means."""
        return False, False

    def _changes(self, finding: Finding) -> bool:
        """Whether the step is computed otherwise from now on."""
        return False

    # -- memory -----------------------------------------------------------------------------------------------

    @property
    def rehearses_whole(self) -> bool:
        """Whether the whole step can be rehearsed too."""
        return True

    def memory(self, data: Any) -> Memory | None:
        """Of the model's device; None where nothing can be measured."""
        self._build(data)
        return self._memory

    def rehearse(self, data: Any, samples: int, split: bool, begin: rehearsal.Begin) -> None:
        """Compute the first samples and write nothing: the reserve for writing is one that nobody grants."""
        try:
            if split:
                self._rehearsal.split(self.compute_split, data, samples, begin)
            else:
                self._rehearsal.whole(self.compute_whole, data, samples, begin)
        except tf.errors.InvalidArgumentError:
            if self.reached() != self.computed:
                raise
        except BaseException:
            self.reached()
            raise

    def bound(self, data: Any) -> int | None:
        """What the whole batch can need at most, where every shape in its graph is known."""
        spec = self._exact(data)
        return None if spec is None else rehearsal.bytes_at_most(self._trace(self._whole, spec))

    def _trace(self, function: Any, spec: Any) -> Any:
        return function.get_concrete_function(spec, rehearsal.ROOM)

    def results(self, data: Any, samples: int) -> int:
        """Bytes of all results in the graph of the whole step on so many samples."""
        return rehearsal.results(self.compute_whole, data, samples)

    def compares(self, data: Any) -> bool:
        """Whether some result has more than one dimension of unknown length: that of the samples, twice."""
        return self._rehearsal.compares(self.compute_whole, data)

    def reached(self) -> int:
        """How far the last, failed run came: 0 not all is computed, 1 no room to write, 2 writing had begun."""
        now = int(self._stage.numpy())
        reached, self._begun = now - self._begun, now
        return reached

    def too_big(self, text: str, what: str = "a single sample does") -> OutOfMemory:
        """The error when nothing is left to split."""
        return too_big(self._model, text, what)

    # -- may it be split? -------------------------------------------------------------------------------------

    def prepare(self, data: Any) -> None:
        """Make sure that this model and loss may be split; `CannotSplit` says why not."""
        if self._split is not None:
            return
        refuse_stateful(self._model)
        refuse_uneven(data)
        few, *others = trials_of(data)
        self._shape = self._look(few)
        batch_norm.refuse(self._model, self._inexact, self._written)
        self._reading = self._ask(few, self._unknown()).reading
        for other in others:
            ask_later(lambda other=other: self._ask(other, first=False))  # type: ignore[misc]
        self._comparisons.made(kind_of(data, self._model))
        self._split = self._compiled(self.compute_split)

    def compare_again(self, data: Any, count: int) -> None:
        """Where this batch is of a kind that was not compared before, or not for long."""
        kind = kind_of(data, self._model)
        doubt, due = self._comparisons.doubt(kind), self._comparisons.due(kind)
        if due is None:
            return
        for number, few in enumerate(trials_of(data)):
            first = due == FIRST and not number
            ask_later(lambda few=few, first=first: self._ask(few, first=first), doubt)  # type: ignore[misc]
        if due == AGAIN and not self._many_seen:
            self._many_seen = True
            ask_later(lambda: self._ask_many(most_of(data, count)), doubt)

    def _ask(self, few: Any, unknown: tuple[bool, bool] = (False, False), *, first: bool = True) -> Finding:
        attempt = self._attempt = self._attempt or self._new_attempt()
        with self._trial():
            finding = probe(attempt, few, self._model, unknown, again=not first)
        written = self._states.among(self._shape.carried)
        restarts = self._states.learn([written[n] for n in sorted(finding.states)])
        if self._changes(finding) or restarts:
            self._shape, self._attempt = self._look(few), None
            if self._split is not None:
                self._split = self._compiled(self.compute_split)
        # What is carried from part to part is no longer what it was in the comparison.
        return self._ask(few, unknown, first=first) if restarts else finding

    def _ask_many(self, many: Any) -> None:
        if self._attempt is not None:
            with self._trial():
                probe_many(self._attempt, many, self._model)
            self._attempt = None  # a graph for so many samples is used once, and keeps its constants

    def _compiled(self, function: Any) -> Any:
        return tf.function(function, reduce_retracing=True, autograph=False)
