"""The step of one compiled model in `fit`, whole or in micro-batches."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import build_on_symbols, functions_in, layers_of
from buoy.keras.exactness.probe import Computed, Finding, Try, as_arrays, gradient_arrays
from buoy.keras.memory.device import memory_of
from buoy.keras.step import batch_norm, rehearsal
from buoy.keras.step.compiled import CompiledStep
from buoy.keras.step.gradient import HoldsNotBack, Shape
from buoy.keras.step.losses import SCALAR
from buoy.keras.step.snapshot import Snapshot, variables_of
from buoy.keras.step.train_step import UNEVEN, Facts, Sums, TrainStep, unpack
from buoy.microbatch.errors import BadBatch, CannotSplit


class Functions(CompiledStep):
    """Runs the step on a batch."""

    computed = 1
    exhausted = (StopIteration, tf.errors.OutOfRangeError)

    def __init__(self, model: Any, inexact: tuple[str, ...]) -> None:
        self.stock: Any = None
        """Keras's own training function, once the model turned out not to fit in here."""
        self._eager, self._jit = model.run_eagerly, model.jit_compile
        self._facts: Facts | None = None
        self._built = False
        self._iterator: Any = None
        self._spec: Any = None
        self._traced: list[tuple[Any, Any, Any]] = []
        self._reserve: Any = None
        super().__init__(model, inexact)
        self._step = TrainStep(model, self._stage, self._states)

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
        self._build(data)
        room = self._reserve if reserve else _NOTHING
        if count == 1:
            logs = self._for_spec(self._whole)(data, room)
        else:
            self.prepare(data)
            self.compare_again(data, count)
            logs = self._for_spec(self._split)(data, room, tf.constant(count))
        self._begun += 2
        return logs

    def compute_whole(self, data: Any, room: Any) -> Any:
        """As Keras computes it."""
        return self._step.whole(data, room)

    def compute_split(self, data: Any, room: Any, count: Any) -> Any:
        """The same in `count` micro-batches."""
        assert self._facts is not None
        return self._step.split(data, count, room, self._facts, Sums(*map(tf.constant, self._reading)))

    def written(self) -> bool:
        """Whether any step has written anything."""
        return bool(self._stage.numpy() > 1)

    def misfit(self, error: Exception) -> bool:
        """Whether the step or the batch is of a kind that Keras alone can do, if anyone."""
        return isinstance(error, (HoldsNotBack, BadBatch))

    def snapshot(self) -> Snapshot:
        """Copies of all that the step writes."""
        return Snapshot(variables_of(self._model))

    def use_stock(self) -> None:
        """From now on as Keras does it."""
        ours = self._model.train_function
        keras.Model.make_train_function(self._model, force=True)
        self.stock, self._model.train_function = self._model.train_function, ours

    def traced(self) -> list[Any]:
        """The `tf.function`s in use."""
        return functions_in(self.stock) if self.stock is not None else [self._whole, self._split]

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

    @property
    def rehearses_whole(self) -> bool:
        """XLA compiles for each number of samples anew, and knows no reserve."""
        return not self._jit

    @property
    def _written(self) -> list[Any] | None:
        return self._step.written

    def _exact(self, data: Any) -> Any:
        return self._spec if self._spec is not None else rehearsal.exact(data)

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
        if not self._jit:
            self._rehearsal.add(
                self.compute_whole if function is self._whole else self.compute_split, spec, traced
            )
        return traced

    def _compiled(self, function: Any) -> Any:
        return function if self._eager else super()._compiled(function)

    def _compiled_whole(self) -> Any:
        if self._eager or not self._jit:
            return self._compiled(self.compute_whole)
        return tf.function(self.compute_whole, reduce_retracing=True, jit_compile=True, autograph=False)

    def _build(self, data: Any) -> None:
        # Inside the step no variable may be created any more.
        if self._built:
            return
        model = self._model
        if not self._built_on_symbols(data):  # as Keras builds it: by tracing its own step
            tf.function(model.train_step, autograph=False).get_concrete_function(data)
        self._reserve = tf.constant(_room(self._step.reserve_bytes), tf.int32)
        self._built = True
        if batch_norm.thawed(model) and self._spec is not None and not self._eager:
            self._trace(self._whole, self._spec)  # it shows which of them learn, and is to be traced anyway
        memory = memory_of(model) if not self._eager else None
        cuts = not batch_norm.learning(model, self._step.written) or "batchnorm" in self._inexact
        # On a GPU what cannot be split fails in words; on the host it must be foreseen.
        self._memory = memory if cuts or (memory is not None and memory.shared) else None

    def _built_on_symbols(self, data: Any) -> bool:
        model = self._model
        if not all(layer.built for layer in layers_of(model)):
            return False
        try:
            build_on_symbols(model, keras.tree.map_structure(_spec, unpack(data)))
        except Exception:  # noqa: BLE001 - outside of training a random crop leaves another shape; a real error comes again
            return False
        return True

    def _look(self, few: Any) -> Shape:
        found: list[Facts] = []
        if self._eager:
            found.append(self._step.facts(few))
        else:
            look = tf.function(lambda data: found.append(self._step.facts(data)), autograph=False)
            look.get_concrete_function(few)
        self._facts = found[0]
        return self._facts.shape

    def _trial(self) -> AbstractContextManager[None]:
        return self._step.unscaled()

    def _unknown(self) -> tuple[bool, bool]:
        assert self._facts is not None
        return SCALAR in self._facts.kinds, self._facts.added

    def _changes(self, finding: Finding) -> bool:
        changes = self._step.streamed and not finding.metrics_add_up
        self._step.streamed = self._step.streamed and not changes
        return changes

    def _new_attempt(self) -> Try:
        facts, step = self._facts, self._step
        assert facts is not None
        metrics = {id(variable) for variable in self._model.metrics_variables}
        measured = [n for n, variable in enumerate(facts.shape.carried) if id(variable) in metrics]
        states = self._states.among(facts.shape.carried)

        def compute(data: Any, count: Any, scalar: Any, added: Any) -> Any:
            whole = step.accumulate(data, count, facts, Sums(scalar, added))
            gradients = [g for g in whole.gradients if g is not None]
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            after = {id(variable): value for variable, value in whole.updates}
            return dense, [whole.updates[n][1] for n in measured], [after[id(each)] for each in states]

        compiled = self._compiled(compute)

        def attempt(data: Any, count: int, scalar: bool, added: bool) -> Computed:
            sums = (known or asked for known, asked in zip(self._reading, (scalar, added), strict=True))
            gradients, state, after = compiled(data, tf.constant(count), *map(tf.constant, sums))
            before = [variable.numpy() for variable in states]
            return Computed(
                gradient_arrays(gradients), as_arrays(state), list(zip(before, as_arrays(after), strict=True))
            )

        return Try(attempt)


def _room(size: int) -> list[int]:
    """As the shape of an array of bytes; one dimension alone ends at 2 GiB."""
    return [-(-size // 4096), 4096]


_NOTHING = tf.constant(_room(0), tf.int32)


def _spec(leaf: Any) -> Any:
    return (
        None if leaf is None else keras.KerasTensor(leaf.shape, str(getattr(leaf.dtype, "name", leaf.dtype)))
    )
