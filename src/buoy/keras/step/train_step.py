"""Keras's own training step in two phases: first everything is computed and nothing written, then all of it is.

In Keras's step each variable is assigned as soon as its own gradient is there, so an out-of-memory error in an earlier
layer leaves later layers updated. Here every assignment waits for all gradients, all new BatchNorm statistics, seeds
and metrics, and for a reserve as large as the update's own temporaries; see docs/micro-batches-keras.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import (
    added_loss,
    attach_mask,
    build_on_symbols,
    call_in_training,
    functions_in,
    layers_of,
    loss_of,
    loss_tracker_of,
    mask_of,
    whole_loss,
)
from buoy.keras.exactness.probe import Computed, Finding, Try, as_arrays, gradient_arrays
from buoy.keras.exactness.rounding import stretch
from buoy.keras.memory.device import memory_of
from buoy.keras.step.compiled import ROOM, CompiledStep, exact
from buoy.keras.step.gradient import (
    AMOUNT,
    ROWS,
    SCALAR,
    SUM,
    HoldsNotBack,
    Measured,
    Micro,
    Shape,
    Sum,
    loop,
    refuse_own_writes,
    refuse_unreduced,
    rows_of,
    shape_of,
    shared,
)
from buoy.keras.step.refusals import learning_norms, thawed_norms
from buoy.keras.step.snapshot import Deferred, Snapshot, variables_of
from buoy.microbatch.errors import BadBatch, CannotSplit

RESERVE = 5
"""The update's temporaries at most, in sizes of all trainable weights: unscaled and clipped gradients, and what
Adam's formula holds at once when every variable is updated in parallel."""

UNEVEN = "buoy: the values of the loss are not spread evenly over the samples"
"""Said by the graph when a micro-batch's share of the loss turned out not to be its share of the samples."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Which losses of unseen reduction are sums (else means), as scalar booleans; the probe finds out."""

    scalar: Any
    added: Any


@dataclass(slots=True)
class Facts:
    """What tracing one micro-batch has shown."""

    shape: Shape
    kinds: list[str]
    """Of each compiled loss; see gradient.py."""
    added: bool
    """Whether layers add losses with `add_loss`."""
    outputs: Any
    """A prediction: its structure and its masks."""


class TrainStep:
    """The step of one compiled model. Its methods build graphs; transaction.py runs them and deals with failure."""

    def __init__(self, model: Any, stage: Any) -> None:
        self.model = model
        self.stage = stage
        """Grows by one when all is computed, and by one more when writing begins."""
        self.opaque = _is_own(model, "compute_loss")
        """The user's own `compute_loss`: one number whose parts nobody can see."""
        self.streamed = not _is_own(model, "compute_metrics")
        """Metrics are updated per micro-batch; else once, with the predictions of all of them put together."""
        self.written: list[Any] | None = None
        """The variables that a step writes beside the weights, once one was traced."""
        self.scaling = True
        """Whether the loss is scaled for half precision; the probe does without."""

    @property
    def reserve_bytes(self) -> int:
        """How much must be free before anything is written."""
        weights = self.model.trainable_weights
        sizes = [math.prod(weight.shape) * int(tf.as_dtype(weight.dtype).size) for weight in weights]
        return RESERVE * int(sum(sizes))

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """In half precision the scale may still be too large, and overflow shows nothing."""
        self.scaling = False
        try:
            yield
        finally:
            self.scaling = True

    def whole(self, data: Any, reserve: Any) -> Any:
        """The step on the whole batch, as Keras computes it."""
        model = self.model
        x, y, sample_weight = unpack(data)
        weights = model.trainable_weights
        with Deferred() as scope:
            with tf.GradientTape() as tape:
                outputs = call_in_training(model, x)
                loss = whole_loss(model, x, y, outputs, sample_weight)
                loss_tracker_of(model).update_state(loss, sample_weight=rows_of(x))
                scaled = self._scaled(loss)
            # Before the gradient, which TensorFlow cannot take of a weight that was given another value.
            refuse_own_writes(weights, scope.updates())
            gradients = tape.gradient(scaled, weights)
            logs = model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        self.written = list(scope.written.values())
        self._commit(gradients, scope.updates(), reserve)
        return logs

    def split(self, data: Any, count: Any, reserve: Any, facts: Facts, sums: Sums) -> Any:
        """The same step in `count` micro-batches."""
        model = self.model
        x, y, sample_weight = unpack(data)
        whole = self.accumulate(data, count, facts, sums)
        total, *parts = whole.values
        with Deferred(whole.updates) as scope:
            own, *others = _trackers(model)
            own.update_state(total, sample_weight=rows_of(x))
            for tracker, part in zip(others, parts, strict=False):
                tracker.update_state(part, sample_weight=keras.tree.flatten(x)[0].shape[0])
            if self.streamed:
                logs = model.get_metrics_result()
            else:
                outputs = _with_leaves(facts.outputs, whole.kept)
                logs = model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        self._commit(whole.gradients, [*whole.updates, *scope.updates()], reserve)
        return logs

    def facts(self, data: Any) -> Facts:
        """Compute one micro-batch (in a graph: only trace it) and note what it looks like."""
        noted: dict[int, Measured] = {}
        nothing = Sums(tf.constant(False), tf.constant(False))
        rows = rows_of(data)
        micro, outputs = self._micro(data, (), rows, rows, nothing, {}, noted)
        self.written = list(micro.scope.written.values())
        return Facts(
            shape=shape_of(
                micro,
                [variable for tracker in _trackers(self.model) for variable in tracker.variables],
            ),
            kinds=[noted[index].kind for index in sorted(noted)],
            added=bool(micro.scope.losses),
            outputs=outputs,
        )

    def accumulate(self, data: Any, count: Any, facts: Facts, sums: Sums) -> Sum:
        """The whole batch's gradients, losses, state and predictions; nothing is written."""
        wholes = self._whole_amounts(data) if AMOUNT in facts.kinds else {}

        def compute(part: Any, state: Iterable[Any], rows: Any, all_rows: Any) -> Micro:
            return self._micro(part, state, rows, all_rows, sums, wholes, {})[0]

        whole = loop(compute, data, count, facts.shape, self.model.trainable_weights)
        # Not a hope but a check: each loss was divided by what its share was computed from.
        spread = [n for n, kind in enumerate(facts.kinds) if kind == ROWS]
        sizes = tf.gather(whole.sizes[:, 1:], tf.constant(spread, tf.int32), axis=1)
        expected = whole.sizes[:, :1] / tf.reduce_sum(whole.sizes[:, :1]) * tf.reduce_sum(sizes, axis=0)
        check = tf.debugging.assert_less(
            tf.abs(sizes - expected), tf.constant(0.5, tf.float64), message=UNEVEN
        )
        with tf.control_dependencies([check]):
            whole.values = [tf.identity(value) for value in whole.values]
        return whole

    def _micro(
        self, data: Any, state: Iterable[Any], rows: Any, all_rows: Any, sums: Sums, wholes: dict[int, Any],
        noted: dict[int, Measured],
    ) -> tuple[Micro, Any]:  # fmt: skip
        model = self.model
        x, y, sample_weight = unpack(data)
        one = tf.constant(1.0, tf.float64)
        share = tf.cast(rows, tf.float64) / tf.cast(all_rows, tf.float64)

        def share_of(index: int, measured: Measured) -> Any:
            noted[index] = measured
            if measured.kind == AMOUNT:
                amount = tf.cast(measured.amount, tf.float64)
                return tf.math.divide_no_nan(amount, tf.cast(wholes.get(index, amount), tf.float64))
            if measured.kind == SCALAR:
                return tf.where(sums.scalar, one, share)
            return one if measured.kind == SUM else share

        parts: dict[int, Any] = {}
        with Deferred(state) as scope:
            with tf.GradientTape() as tape:
                outputs = call_in_training(model, x)
                if self.opaque:
                    total = whole_loss(model, x, y, outputs, sample_weight)
                    refuse_unreduced(total)
                    total *= tf.cast(share_of(0, Measured(SCALAR, None)), total.dtype)
                else:
                    # As Keras's own compute_loss adds up, with each part counted for its share of the whole batch.
                    total = tf.zeros(())
                    if (compiled := loss_of(model)) is not None:
                        with shared(compiled, share_of, parts):
                            total = compiled(y, outputs, sample_weight)
                    added = {id(loss) for loss in scope.losses}
                    for loss in model.losses:
                        own = tf.where(sums.added, one, share) if id(loss) in added else share
                        value = added_loss(model, loss)
                        total += tf.cast(value * tf.cast(own, value.dtype), total.dtype)
                scaled = self._scaled(total)
            refuse_own_writes(model.trainable_weights, scope.updates())
            gradients = tape.gradient(scaled, model.trainable_weights)
            if self.streamed:
                model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        values = [total, *(parts[n] for n in sorted(parts))]
        sizes = [rows, *(_size(noted[n]) for n in sorted(noted))]
        return Micro(gradients, values, sizes, [] if self.streamed else _leaves(outputs), scope), outputs

    def _whole_amounts(self, data: Any) -> dict[int, Any]:
        # Only masks and weights are asked for: TensorFlow prunes the forward pass itself out of this graph.
        if tf.executing_eagerly():
            raise CannotSplit(
                "a masked or weighted mean cannot be split while the model runs eagerly",
                received="compile(run_eagerly=True)",
                expected="a compiled graph",
                hint="compile the model without `run_eagerly=True`",
            )
        found: dict[int, Any] = {}
        x, y, sample_weight = unpack(data)

        def note(index: int, measured: Measured) -> Any:
            if measured.kind == AMOUNT:
                found[index] = measured.amount
            return tf.constant(1.0)

        compiled = loss_of(self.model)
        with Deferred(), shared(compiled, note, {}):
            compiled(y, call_in_training(self.model, x), sample_weight)
        return found

    def _scaled(self, loss: Any) -> Any:
        if not self.scaling:
            return loss * tf.cast(stretch(), loss.dtype)
        return loss if self.model.optimizer is None else self.model.optimizer.scale_loss(loss)

    def _commit(self, gradients: list[Any], updates: list[tuple[Any, Any]], reserve: Any) -> None:
        weights = self.model.trainable_weights
        refuse_own_writes(weights, updates)
        computed = [leaf for gradient in gradients if gradient is not None for leaf in _components(gradient)]
        with tf.control_dependencies([*computed, *(value for _, value in updates)]):
            reached = self.stage.assign_add(1, read_value=False)
        with tf.control_dependencies([reached]):
            # XLA writes at the end of its own accord, and would fill the reserve with zeros.
            room = reached if self.model.jit_compile else tf.raw_ops.Empty(shape=reserve, dtype=tf.uint8)
        with tf.control_dependencies([room]):
            del room
            begun = self.stage.assign_add(1, read_value=False)
        with tf.control_dependencies([begun]):
            if weights:
                self.model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            else:
                warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            for variable, value in updates:
                variable.assign(value)


def _is_own(model: Any, name: str) -> bool:
    """Whether a method of the user's own stands in place of Keras's, in the model's class or in this one model."""
    return name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """Keras's (x, y, sample_weight); an absent part of a `tf.data` element is None."""
    present = keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(present)
    return x, y, sample_weight


def _trackers(model: Any) -> list[Any]:
    """Keras's running means: of the whole loss, then of each part of it."""
    compiled = loss_of(model)
    return [loss_tracker_of(model), *(compiled.metrics if compiled is not None else [])]


def _components(gradient: Any) -> list[Any]:
    return [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def _size(measured: Measured) -> Any:
    return tf.constant(0) if measured.amount is None else measured.amount


def _leaves(outputs: Any) -> list[Any]:
    """The predictions and, behind each that has one, its mask."""
    flat = []
    for leaf in keras.tree.flatten(outputs):
        mask = mask_of(leaf)
        flat += [leaf] if mask is None else [leaf, mask]
    return flat


def _with_leaves(outputs: Any, joined: list[Any]) -> Any:
    waiting = iter(joined)
    leaves = []
    for leaf in keras.tree.flatten(outputs):
        value = next(waiting)
        if mask_of(leaf) is not None:
            attach_mask(value, next(waiting))
        leaves.append(value)
    return keras.tree.pack_sequence_as(outputs, leaves)


class FitStep(CompiledStep):
    """The step of one compiled model in `fit`, whole or in micro-batches."""

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
        self._nothing: Any = None
        super().__init__(model, inexact)
        self._step = TrainStep(model, self._stage)

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
        room = self._reserve if reserve else self._nothing
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
        return Snapshot(variables_of(self.model))

    def use_stock(self) -> None:
        """From now on as Keras does it."""
        ours = self.model.train_function
        keras.Model.make_train_function(self.model, force=True)
        self.stock, self.model.train_function = self.model.train_function, ours

    def traced(self) -> list[Any]:
        """The `tf.function`s in use."""
        return functions_in(self.stock) if self.stock is not None else [self._whole, self._split]

    def explained(self, error: Exception) -> Exception:
        """The error in words, where it is one of the checks inside the graph."""
        if isinstance(error, tf.errors.InvalidArgumentError) and UNEVEN in str(error):
            return CannotSplit(
                "the loss does not return the same number of values for every sample",
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
        return self._spec if self._spec is not None else exact(data)

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
        traced = function.get_concrete_function(spec, ROOM, *more)
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
        model = self.model
        if not self._built_on_symbols(data):  # as Keras builds it: by tracing its own step
            tf.function(model.train_step, autograph=False).get_concrete_function(data)
        self._reserve = tf.constant(_room(self._step.reserve_bytes), tf.int32)
        self._nothing = tf.constant(_room(0), tf.int32)
        self._built = True
        if thawed_norms(model) and self._spec is not None and not self._eager:
            self._trace(self._whole, self._spec)  # it shows which of them learn, and is to be traced anyway
        memory = memory_of(model) if not self._eager else None
        cuts = not learning_norms(model, self._step.written) or "batchnorm" in self._inexact
        # On a GPU what cannot be split fails in words; on the host it must be foreseen.
        self._memory = memory if cuts or (memory is not None and memory.shared) else None

    def _built_on_symbols(self, data: Any) -> bool:
        model = self.model
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
        metrics = {id(variable) for variable in self.model.metrics_variables}
        measured = [n for n, variable in enumerate(facts.shape.carried) if id(variable) in metrics]

        def compute(data: Any, count: Any, scalar: Any, added: Any) -> Any:
            whole = step.accumulate(data, count, facts, Sums(scalar, added))
            gradients = [g for g in whole.gradients if g is not None]
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            return dense, [whole.updates[n][1] for n in measured]

        compiled = self._compiled(compute)

        def attempt(data: Any, count: int, scalar: bool, added: bool) -> Computed:
            sums = (known or asked for known, asked in zip(self._reading, (scalar, added), strict=True))
            gradients, measures = compiled(data, tf.constant(count), *map(tf.constant, sums))
            return Computed(gradient_arrays(gradients), as_arrays(measures))

        return Try(attempt)


def _room(size: int) -> list[int]:
    """As the shape of an array of bytes; one dimension alone ends at 2 GiB."""
    return [-(-size // 4096), 4096]


def _spec(leaf: Any) -> Any:
    return (
        None if leaf is None else keras.KerasTensor(leaf.shape, str(getattr(leaf.dtype, "name", leaf.dtype)))
    )
