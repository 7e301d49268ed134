"""A compiled step that can be rehearsed, split and repeated: what those of `fit` and of `buoy.keras.gradients` share.

Built once per `compile`, traced when first needed. Whether it may be split is asked before the first split, and again
at the 1st, 2nd, 4th... split of each kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from buoy.keras.data.pipeline import hidden_operations
from buoy.keras.exactness.probe import Finding, Try, ask_later, probe, probe_many
from buoy.keras.exactness.samples import kind_of, map_leaves, most_of, trials_of
from buoy.keras.memory.device import Memory
from buoy.keras.step.gradient import Shape, part_of
from buoy.keras.step.refusals import refuse_batch_norm, refuse_state, refuse_stateful, refuse_uneven
from buoy.keras.step.snapshot import Snapshot
from buoy.microbatch.exactness import Asked

Begin = Callable[[], object]
"""Called when all is ready and the computing begins."""


class CompiledStep(ABC):
    """What `transaction.Retry` repeats, as far as both kinds have it in common."""

    computed = 0
    """How far a step comes that is rehearsed: all is computed, and nothing is written."""

    def __init__(self, model: Any, inexact: tuple[str, ...]) -> None:
        self.model, self._inexact = model, inexact
        self._stage = tf.Variable(0, dtype=tf.int64, trainable=False, name="buoy_stage")
        """Grows with each step by two, in one or two moves."""
        self._begun = 0
        self._memory: Memory | None = None
        self._asked = Asked()
        self._kinds: set[Hashable] = set()
        """Of the steps that were split."""
        self._compared: Hashable = None
        """The kind of step that was compared just before it is split."""
        self._many_seen = False
        self._reading = (False, False)
        """Which losses that nobody can see into are sums: scalar ones, added ones."""
        self._forget()

    def _forget(self) -> None:
        """Drop everything that was traced."""
        self._whole: Any = self._compiled_whole()
        self._split: Any = None
        self._attempt: Try | None = None
        self._rehearsal = Rehearsal()

    # -- what each of them is ---------------------------------------------------------------------------------

    @abstractmethod
    def run(self, data: Any, count: int, reserve: bool) -> Any:
        """Do it in `count` micro-batches; `reserve`: only with room for the update. Raises what TensorFlow raises."""

    @abstractmethod
    def explained(self, error: Exception) -> Exception:
        """The error in words, where it is one of the checks inside the graph."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Copies of all that the step writes."""

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

    def _state(self) -> list[Any]:
        """What the forward pass writes, as far as it must be known what it is."""
        return self._shape.carried

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
        """Whether the whole step can be rehearsed too, not only a micro-batch."""
        return True

    def memory(self, data: Any) -> Memory | None:
        """Of the model's device, with all there that is made once; None where nothing can be measured or split."""
        self._build(data)
        return self._memory

    def rehearse(self, data: Any, samples: int, split: bool, begin: Begin) -> None:
        """Compute the first samples and write nothing: the reserve for writing is one that nobody grants.

        `split`: as one of several micro-batches. `begin` is called when all is ready and the computing begins.
        """
        try:
            if split:
                self._rehearsal.split(self.compute_split, data, samples, begin)
            else:
                self._rehearsal.run(self.compute_whole, data, samples, begin)
        except tf.errors.InvalidArgumentError:
            if self.reached() != self.computed:
                raise
        except BaseException:
            self.reached()
            raise

    def bound(self, data: Any) -> int | None:
        """What the whole batch can need at most, where every shape in its graph is known."""
        spec = self._exact(data)
        return None if spec is None else bytes_at_most(self._trace(self._whole, spec))

    def _trace(self, function: Any, spec: Any) -> Any:
        return function.get_concrete_function(spec, ROOM)

    def results(self, data: Any, samples: int) -> int:
        """Bytes of all results in the graph of the whole step on so many samples."""
        return results(self.compute_whole, data, samples)

    def compares(self, data: Any) -> bool:
        """Whether some result has more than one dimension of unknown length: that of the samples, twice.

        The need may then grow with their square.
        """
        return self._rehearsal.compares(self.compute_whole, data)

    def reached(self) -> int:
        """How far the last, failed run came: 0 not all is computed, 1 no room to write, 2 writing had begun."""
        now = int(self._stage.numpy())
        reached, self._begun = now - self._begun, now
        return reached

    # -- may it be split? -------------------------------------------------------------------------------------

    def prepare(self, data: Any) -> None:
        """Make sure that this model and loss may be split; `CannotSplit` says why not."""
        if self._split is not None:
            return
        refuse_stateful(self.model)
        refuse_uneven(data)
        few, *others = trials_of(data)
        self._shape = self._look(few)
        refuse_batch_norm(self.model, self._inexact, self._written)
        refuse_state(self.model, self._state())
        self._reading = self._ask(few, self._unknown()).reading
        for other in others:
            ask_later(lambda other=other: self._ask(other, first=False))  # type: ignore[misc]
        self._compared = kind_of(data, self.model)
        self._split = self._compiled(self.compute_split)

    def compare_again(self, data: Any, count: int) -> None:
        """At the 1st, 2nd, 4th, 8th... split step of each kind."""
        kind = kind_of(data, self.model)
        doubt, known = self._asked.doubt(kind), self._asked.known_as(kind)
        is_new, is_compared = known not in self._kinds, kind == self._compared
        self._kinds.add(known)
        self._compared = None
        if not self._asked.is_due(kind, done=True) or is_compared:
            return
        for number, few in enumerate(trials_of(data)):
            first = is_new and not number
            ask_later(lambda few=few, first=first: self._ask(few, first=first), doubt)  # type: ignore[misc]
        if not is_new and not self._many_seen:
            self._many_seen = True
            ask_later(lambda: self._ask_many(most_of(data, count)), doubt)

    def _ask(self, few: Any, unknown: tuple[bool, bool] = (False, False), *, first: bool = True) -> Finding:
        attempt = self._attempt = self._attempt or self._new_attempt()
        with self._trial():
            finding = probe(attempt, few, self.model, unknown, again=not first)
        if self._changes(finding):
            self._shape, self._attempt = self._look(few), None
            if self._split is not None:
                self._split = self._compiled(self.compute_split)
        return finding

    def _ask_many(self, many: Any) -> None:
        if self._attempt is not None:
            with self._trial():
                probe_many(self._attempt, many, self.model)
            self._attempt = None  # a graph for so many samples is used once, and keeps its constants

    def _compiled(self, function: Any) -> Any:
        return tf.function(function, reduce_retracing=True, autograph=False)


# -- rehearsals: a step computed on a few samples and not done ----------------------------------------------------

_IMPOSSIBLE = [-1, 4096]
"""A reserve that no device grants: the step stops when all is computed and nothing is written."""
ROOM = tf.TensorSpec((2,), tf.int32)

_ASIDE = ("PyFunc", "EagerPyFunc", "PrintV2", "WriteSummary")
_INSIDE = (
    "While",
    "StatelessWhile",
    "If",
    "StatelessIf",
    "Case",
    "PartitionedCall",
    "StatefulPartitionedCall",
)


class Rehearsal:
    """The graphs of one step for any number of samples; made when first needed."""

    def __init__(self) -> None:
        self._traced: list[tuple[Any, Any, Any]] = []
        self._checked: list[Any] = []

    def split(self, function: Any, data: Any, samples: int, begin: Begin) -> None:
        """Compute `function(data, reserve, count)` on two parts of so many samples, where there are as many.

        One part alone would need less: from the second on, the gradients of the parts before it are there too.
        """
        rows = next(leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None)
        count = 2 if 2 * samples <= rows + 1 else 1
        self.run(function, data, min(rows, count * samples), begin, tf.constant(count))

    def run(self, function: Any, data: Any, samples: int, begin: Begin, *more: Any) -> None:
        """Compute `function(data, reserve, *more)` on the first samples; always raises what ends it."""
        traced = self._graph(function, data, more)
        part = part_of(data, 0, samples)  # a copy that the step itself does not make
        begin()
        traced(part, tf.constant(_IMPOSSIBLE, tf.int32), *more)

    def compares(self, function: Any, data: Any) -> bool:
        """Whether some result has a second dimension of unknown length, where no array of the batch has one."""
        traced = self._graph(function, data, ())
        given = [
            spec for spec in keras.tree.flatten(traced.structured_input_signature[0][0]) if spec is not None
        ]
        if any(None in spec.shape[1:] for spec in given):
            return False
        outputs = [out for op in traced.graph.get_operations() if op.type != "Empty" for out in op.outputs]
        shapes = [out.shape for out in outputs if out.shape.rank is not None]
        return any(list(shape).count(None) > 1 for shape in shapes)

    def add(self, function: Any, spec: Any, traced: Any) -> None:
        """A graph that is there already."""
        if spec == loose(spec):
            self._traced.append((spec, function, traced))

    def _graph(self, function: Any, data: Any, more: tuple[Any, ...]) -> Any:
        given = loose(data)
        if given is None:
            raise ValueError("not every part of the batch is an array of samples")
        known = (each for spec, of, each in self._traced if of == function and _serves(spec, given))
        traced = next(known, None)
        if traced is None:
            # A function of its own: another graph in the cache of the step's would change which one the step uses.
            own = tf.function(function, autograph=False)
            traced = own.get_concrete_function(given, ROOM, *(tf.TensorSpec((), each.dtype) for each in more))
            self._traced.append((given, function, traced))
        if traced not in self._checked:
            if not repeatable(traced):
                raise ValueError("the step calls Python or draws from hidden RNGs: not computed twice")
            self._checked.append(traced)
        return traced


def exact(data: Any) -> Any:
    """The arrays as they are; None where something is no array of samples."""
    if not all(leaf is None or _has_rows(leaf) for leaf in keras.tree.flatten(data)):
        return None
    return map_leaves(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), data)


def loose(data: Any) -> Any:
    """The same arrays with any number of samples."""
    return None if exact(data) is None else _with_rows(data, None)


def _with_rows(data: Any, samples: int | None) -> Any:
    return map_leaves(lambda leaf: tf.TensorSpec((samples, *leaf.shape[1:]), leaf.dtype), data)


def bytes_at_most(traced: Any) -> int | None:
    """All that a graph of known shapes can ever hold: every result of every operation; None where that is not known."""
    total = 0
    for operation in traced.graph.get_operations():
        if operation.type in _INSIDE:
            return None
        if operation.type == "Empty":  # the reserve, which is given back before anything is written
            continue
        for output in operation.outputs:
            if not output.shape.is_fully_defined():
                return None
            total += math.prod(output.shape) * (output.dtype.size or 0)
    return int(total)


def results(function: Any, data: Any, samples: int) -> int:
    """Bytes of all results of `function(data, reserve)` on so many samples, as far as its shapes are known."""
    spec = _with_rows(data, samples)
    graph = tf.function(function, autograph=False).get_concrete_function(spec, ROOM).graph
    # A weight that is read is there already.
    made = [op for op in graph.get_operations() if op.type not in ("Empty", "ReadVariableOp")]
    outputs = [out for op in made for out in op.outputs]
    return sum(
        math.prod(out.shape) * (out.dtype.size or 0) for out in outputs if out.shape.is_fully_defined()
    )


def repeatable(traced: Any) -> bool:
    """Whether computing it once more is unnoticed: no hidden RNG moves on, no Python of the user's is called."""
    return not hidden_operations(traced, _ASIDE)


def _serves(spec: Any, given: Any) -> bool:
    """Whether a graph for these arrays takes those."""
    pairs = zip(keras.tree.flatten(spec), keras.tree.flatten(given), strict=False)
    return all(
        a is b
        or (a is not None and b is not None and a.dtype == b.dtype and a.shape.is_compatible_with(b.shape))
        for a, b in pairs
    )


def _has_rows(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    return shape is not None and hasattr(leaf, "dtype") and len(shape) > 0
