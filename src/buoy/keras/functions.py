"""The compiled functions of one model's step: built once per `compile`, traced when first needed."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from buoy.keras import batch_norm, rehearsal
from buoy.keras.few import most_of, trials_of
from buoy.keras.kind import AGAIN, FIRST, Comparisons, kind_of
from buoy.keras.losses import SCALAR
from buoy.keras.memory import Memory, memory_of
from buoy.keras.peak import too_big
from buoy.keras.probe import (
    Answer,
    Finding,
    Try,
    as_arrays,
    ask_later,
    gradient_arrays,
    probe,
    probe_many,
)
from buoy.keras.refusals import refuse_stateful, refuse_uneven
from buoy.keras.snapshot import Snapshot, variables_of
from buoy.keras.train_step import UNEVEN, Facts, HoldsNotBack, Sums, TrainStep, unpack
from buoy.microbatch.errors import BadBatch, CannotSplit, OutOfMemory


class Functions:
    """Runs the step on a batch, whole or in micro-batches."""

    exhausted = (StopIteration, tf.errors.OutOfRangeError)

    def __init__(self, model: Any, inexact: tuple[str, ...]) -> None:
        self.stock: Any = None
        """Keras's own training function, once the model turned out not to fit in here."""
        self._model = model
        self._inexact = inexact
        self._step = TrainStep(model)
        self._eager = model.run_eagerly
        self._whole = self._compiled(self._step.whole, jit=model.jit_compile)
        self._split: Any = None
        self._comparisons = Comparisons()
        self._many_seen = False
        self._attempt: Try | None = None
        self._facts: Facts | None = None
        self._sums = Sums(tf.constant(False), tf.constant(False))
        self._built = False
        self._iterator: Any = None
        self._spec: Any = None
        self._traced: list[tuple[Any, Any, Any]] = []
        self._begun = 0
        self._reserve: Any = None
        self._memory: Memory | None = None
        self._rehearsal = rehearsal.Rehearsal()

    def fetch(self, iterator: Any) -> Any:
        """The next batch."""
        if not isinstance(iterator, tf.data.Iterator):
            self._spec = None
            return next(iterator)
        if iterator is not self._iterator:
            self._iterator, self._spec = iterator, iterator.element_spec
        return iterator.get_next()

    def run(self, data: Any, count: int, reserve: bool) -> Any:
        """The step; raises what TensorFlow raises, with nothing written unless `reached` says otherwise."""
        if not self._built:
            self._build(data)
        room = self._reserve if reserve else _NOTHING
        if count == 1:
            logs = self._for_spec(self._whole)(data, room)
        else:
            self.prepare(data)
            self._compare_later(data, count)
            logs = self._for_spec(self._split)(data, room, tf.constant(count))
        self._begun += 2
        return logs

    def written(self) -> bool:
        """Whether any step has written anything."""
        return bool(self._step.stage.numpy() > 1)

    def misfit(self, error: Exception) -> bool:
        """Whether the step or the batch is of a kind that Keras alone can do, if anyone."""
        return isinstance(error, (HoldsNotBack, BadBatch))

    def snapshot(self) -> Snapshot:
        """Copies of all that the step writes."""
        return Snapshot(variables_of(self._model))

    def too_big(self, text: str, what: str = "a single sample does") -> OutOfMemory:
        """The error when nothing is left to split."""
        return too_big(self._model, text, what)

    def use_stock(self) -> None:
        """From now on as Keras does it."""
        self.stock = self._model._make_function(self._model.train_step)

    def reached(self) -> int:
        """How far the last, failed run came: 0 nothing is computed, 1 no room to write, 2 writing had begun."""
        now = int(self._step.stage.numpy())
        reached, self._begun = now - self._begun, now
        return reached

    def explained(self, error: Exception) -> Exception:
        """The error in words, where it is one of the checks inside the graph."""
        if isinstance(error, tf.errors.InvalidArgumentError) and UNEVEN in str(error):
            return CannotSplit(
                "the loss does not give every sample the same number of values",
                received="a loss function that drops or repeats samples before its mean",
                expected="one value (or one row of values) per sample",
                hint="give the dropped samples a sample_weight of 0 instead, or use a Keras mask",
            )
        return error

    def memory(self, data: Any) -> Memory | None:
        """Of the model's device; None where the step cannot be computed without being done,
        or cannot be cut on a GPU."""
        if not self._built:
            self._build(data)
        return self._memory

    @property
    def rehearses_whole(self) -> bool:
        """XLA compiles for each number of samples anew, and knows no reserve."""
        return not self._model.jit_compile

    def rehearse(self, data: Any, samples: int, split: bool, begin: rehearsal.Begin) -> None:
        """Compute the first samples and write nothing: the reserve for writing is one that nobody grants."""
        try:
            if split:
                self._rehearsal.split(self._split_step, data, samples, begin)
            else:
                self._rehearsal.whole(self._step.whole, data, samples, begin)
        except tf.errors.InvalidArgumentError:
            if self.reached() != 1:
                raise
        except BaseException:
            self.reached()
            raise

    def bound(self, data: Any) -> int | None:
        """What the whole batch can need at most, where every shape in its graph is known."""
        spec = self._spec if self._spec is not None else rehearsal.exact(data)
        return None if spec is None else rehearsal.bytes_at_most(self._trace(self._whole, spec))

    def results(self, data: Any, samples: int) -> int:
        """Bytes of all results in the graph of the uncut step on so many samples."""
        return rehearsal.results(self._step.whole, data, samples)

    def compares(self, data: Any) -> bool:
        """Whether some result has more than one dimension of unknown length: that of the samples, twice."""
        return self._rehearsal.compares(self._step.whole, data)

    def prepare(self, data: Any) -> None:
        """Make sure that this model and loss may be split; `CannotSplit` says why not."""
        if self._split is not None:
            return
        refuse_stateful(self._model)
        refuse_uneven(data)
        few, *others = trials_of(data)
        looked = self._look(few) if self._step.written is None else None
        batch_norm.refuse(self._model, self._inexact, self._step.written)
        self._facts = looked or self._look(few)
        finding = self._ask(few)
        self._sums = Sums(tf.constant(finding.scalar_sums), tf.constant(finding.added_sums))
        for other in others:
            ask_later(lambda other=other: self._ask(other, again=True, first=False))  # type: ignore[misc]
        self._comparisons.made(kind_of(data, self._model))
        self._split = self._compiled(self._split_step, jit=False)

    def _compare_later(self, data: Any, count: int) -> None:
        """Where this batch is of a kind that was not compared before, or not for long."""
        kind = kind_of(data, self._model)
        doubt, due = self._comparisons.doubt(kind), self._comparisons.due(kind)
        if due is None:
            return
        for number, few in enumerate(trials_of(data)):
            first = due == FIRST and not number
            ask_later(lambda few=few, first=first: self._ask(few, again=True, first=first), doubt)  # type: ignore[misc]
        if due == AGAIN and not self._many_seen:
            self._many_seen = True
            ask_later(lambda: self._ask_many(most_of(data, count)), doubt)

    def _split_step(self, data: Any, reserve: Any, count: Any) -> Any:
        assert self._facts is not None
        return self._step.split(data, count, reserve, self._facts, self._sums)

    def _for_spec(self, function: Any) -> Any:
        # Traced for what the data set promises, as Keras traces it, not for the shape of the first batch: the last,
        # smaller batch is then no new graph, and rounding is that of Keras.
        if self._spec is None or self._eager:
            return function
        return self._trace(function, self._spec)

    def _trace(self, function: Any, spec: Any) -> Any:
        for known, of_function, traced in self._traced:
            if of_function is function and (known is spec or known == spec):
                return traced
        more = () if function is self._whole else (tf.TensorSpec((), tf.int32),)
        traced = function.get_concrete_function(spec, rehearsal.ROOM, *more)
        self._traced.append((spec, function, traced))
        if not self._model.jit_compile:
            self._rehearsal.add(
                self._step.whole if function is self._whole else self._split_step, spec, traced
            )
        return traced

    def _compiled(self, function: Any, *, jit: bool) -> Any:
        if self._eager:
            return function
        return tf.function(function, reduce_retracing=True, jit_compile=jit, autograph=False)

    def _build(self, data: Any) -> None:
        # Inside the step no variable may be created any more.
        model = self._model
        if not self._built_on_symbols(data):  # as Keras builds it: by tracing its own step
            tf.function(model.train_step, autograph=False).get_concrete_function(data)
        self._reserve = tf.constant(_room(self._step.reserve_bytes), tf.int32)
        self._built = True
        if batch_norm.thawed(model) and self._spec is not None and not self._eager:
            self._trace(self._whole, self._spec)  # it shows which of them learn, and is to be traced anyway
        memory = memory_of(model) if not self._eager else None
        cuts = not batch_norm.learning(model, self._step.written) or "batchnorm" in self._inexact
        # On a GPU what cannot be cut fails in words; on the host it must be foreseen.
        self._memory = memory if cuts or (memory is not None and memory.shared) else None

    def _built_on_symbols(self, data: Any) -> bool:
        model = self._model
        if not all(layer.built for layer in model._flatten_layers()):
            return False
        try:
            model._symbolic_build(data_batch=keras.tree.map_structure(_spec, unpack(data)))
        except Exception:  # noqa: BLE001 - outside of training a random crop leaves another shape; a real error comes again
            return False
        return True

    def _look(self, few: Any) -> Facts:
        found: list[Facts] = []
        if self._eager:
            return self._step.facts(few)
        tf.function(lambda data: found.append(self._step.facts(data)), autograph=False).get_concrete_function(
            few
        )
        return found[0]

    def _ask(self, few: Any, *, again: bool = False, first: bool = True) -> Finding:
        """What the probe finds; the second time losses are read as they were found to be the first."""
        step, facts = self._step, self._facts
        assert facts is not None
        unknown = (SCALAR in facts.kinds and not again, facts.added and not again)
        attempt = self._attempt = self._attempt or self._new_attempt()
        with step.unscaled():
            finding = probe(attempt, few, self._model, unknown, again=not first)
        written = step.states.among(facts.shape.carried)
        restarts = step.states.learn([written[n] for n in sorted(finding.states)])
        streams = step.streamed and not finding.metrics_add_up
        if streams or restarts:
            step.streamed = step.streamed and not streams
            self._facts, self._attempt = self._look(few), None
            if self._split is not None:
                self._split = self._compiled(self._split_step, jit=False)
        # What is carried from part to part is no longer what it was in the comparison.
        return self._ask(few, again=again, first=first) if restarts else finding

    def _ask_many(self, many: Any) -> None:
        if self._attempt is None:
            return
        with self._step.unscaled():
            probe_many(self._attempt, many, self._model)

    def _new_attempt(self) -> Try:
        facts, step = self._facts, self._step
        assert facts is not None
        metrics = {id(variable) for variable in self._model.metrics_variables}
        measured = [n for n, variable in enumerate(facts.shape.carried) if id(variable) in metrics]
        states = step.states.among(facts.shape.carried)

        def compute(data: Any, count: Any, scalar: Any, added: Any) -> Any:
            whole = step.accumulate(data, count, facts, Sums(scalar, added))
            gradients = [g for g in whole.gradients if g is not None]
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            after = {id(variable): value for variable, value in whole.updates}
            return dense, [whole.updates[n][1] for n in measured], [after[id(each)] for each in states]

        compiled = self._compiled(compute, jit=False)

        def attempt(data: Any, count: int, scalar: bool, added: bool) -> Answer:
            known = self._sums
            gradients, state, after = compiled(
                data, tf.constant(count), known.scalar | tf.constant(scalar), known.added | tf.constant(added)
            )
            before = [variable.numpy() for variable in states]
            return Answer(
                gradient_arrays(gradients), as_arrays(state), list(zip(before, as_arrays(after), strict=True))
            )

        return attempt


def _room(size: int) -> list[int]:
    """As the shape of an array of bytes; one dimension alone ends at 2 GiB."""
    return [-(-size // 4096), 4096]


_NOTHING = tf.constant(_room(0), tf.int32)


def _spec(leaf: Any) -> Any:
    return (
        None if leaf is None else keras.KerasTensor(leaf.shape, str(getattr(leaf.dtype, "name", leaf.dtype)))
    )
