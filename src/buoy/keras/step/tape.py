"""Micro-batches for a loop of one's own: the whole batch's gradient where `tf.GradientTape` runs out of memory.

The counterpart of `run.backward` in PyTorch; the optimizer's step stays in the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy.flight import recorder
from buoy.keras.exactness.probe import Computed, Finding, Try, as_arrays, gradient_arrays
from buoy.keras.exactness.rounding import stretch
from buoy.keras.exactness.samples import few_of, learning
from buoy.keras.memory.device import memory_of
from buoy.keras.step.compiled import CompiledStep, exact
from buoy.keras.step.gradient import Micro, Shape, loop, refuse_own_writes, rows_of, shape_of
from buoy.keras.step.refusals import refuse_backend, refuse_replicas, without_norms
from buoy.keras.step.sizes import Event
from buoy.keras.step.snapshot import Deferred, Snapshot
from buoy.keras.step.transaction import Retry
from buoy.microbatch.errors import BadLoss, CannotSplit

LossFunction = Callable[[Any], Any]
_NO_WEIGHT = "buoy: the weight of the loss is not above 0"


def gradients(
    model: Any,
    loss_fn: LossFunction,
    *,
    reduction: str = "mean",
    micro_batch: int | None = None,
    inexact: tuple[str, ...] = (),
) -> Gradients:
    """A function from a batch to (loss, gradients of `model.trainable_variables`) that survives running out of memory.

    `loss_fn(batch)` gives the loss of the samples it is handed: a mean or a sum over them, or (sum, weight) for a mean
    over tokens. Make it once, outside the loop: it is compiled.

    >>> step = gradients(model, lambda batch: loss(batch[1], model(batch[0], training=True)))  # doctest: +SKIP
    >>> for batch in dataset:  # doctest: +SKIP
    ...     value, found = step(batch)
    ...     optimizer.apply_gradients(zip(found, model.trainable_variables))
    """
    if reduction not in ("mean", "sum"):
        raise BadLoss(
            "unknown reduction", received=repr(reduction), expected='"mean" or "sum"',
            hint="for a mean over tokens return (sum of the losses, number of tokens)",
        )  # fmt: skip
    refuse_backend("buoy.keras.gradients")
    # The model's own strategy is told by where its weights are; before it is built, by where we are.
    refuse_replicas(getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy())
    there = recorder.current()
    event: Event = there.event if there is not None else lambda *args, **values: None
    return Gradients(_Step(model, loss_fn, reduction, inexact), event, micro_batch)


class Gradients(Retry):
    """What `gradients` makes: called with a batch. `buoy.keras.Loop.track(step=...)` keeps the sizes it has found."""

    def __init__(self, step: _Step, event: Event, micro_batch: int | None) -> None:
        super().__init__(_say, event, micro_batch)
        self._step = step

    def __call__(self, batch: Any) -> tuple[Any, list[Any]]:
        """(loss, gradients) of the whole batch."""
        found: tuple[Any, list[Any]] = self.run(self._step, batch)
        return found


class _Step(CompiledStep):
    """Computes gradients, then writes BatchNorm statistics and seeds."""

    def __init__(self, model: Any, loss_fn: LossFunction, reduction: str, inexact: tuple[str, ...]) -> None:
        self._loss_fn, self._reduction = loss_fn, reduction
        self._no_room = tf.constant([0, 4096], tf.int32)
        self._wrote: list[Any] = []
        self._learning: Hashable = None
        self._trying = False
        """A comparison is traced."""
        super().__init__(model, inexact)

    def run(self, data: Any, count: int, reserve: bool) -> Any:
        """(loss, gradients)"""
        del reserve  # nothing is allocated once writing begins
        self._build(data)
        if count == 1:
            result = self._whole(data, self._no_room)
        else:
            self.prepare(data)
            self.compare_again(data, count)
            result = self._split(data, self._no_room, tf.constant(count))
        self._begun += 2
        return result

    def explained(self, error: Exception) -> Exception:
        """The error in words, where it is the check inside the graph."""
        if isinstance(error, tf.errors.InvalidArgumentError) and _NO_WEIGHT in str(error):
            return BadLoss(
                "the loss of this batch has no positive weight",
                received="(sum, weight) with a weight of 0 or less",
                expected="a number above 0: of tokens, or of samples that are not ignored",
                hint="nothing of the step was done; leave out batches in which everything is ignored",
            )
        return error

    def snapshot(self) -> Snapshot:
        """Copies of what the forward pass writes."""
        return Snapshot(self._wrote)

    @property
    def _written(self) -> list[Any] | None:
        return self._wrote

    def _exact(self, data: Any) -> Any:
        return exact(data)

    def _compiled_whole(self) -> Any:
        return self._compiled(self.compute_whole)

    def _look(self, few: Any) -> Shape:
        found: list[Shape] = []

        def look(part: Any) -> None:
            rows = rows_of(part)
            found.append(shape_of(self._micro(part, (), rows, rows)))

        tf.function(look, autograph=False).get_concrete_function(few)
        self._wrote = found[0].carried
        return found[0]

    def _state(self) -> list[Any]:
        # A metric that the loss function updates is mostly not the model's: the comparison shows whether it adds up.
        own = {id(variable) for variable in self.model.variables}
        return [variable for variable in self._shape.carried if id(variable) in own]

    def _changes(self, finding: Finding) -> bool:
        if not finding.metrics_add_up:
            metrics = without_norms(self.model, self._shape.carried)
            raise CannotSplit(
                "the batch cannot be split: what the loss function updates would end up different in micro-batches",
                received=", ".join(str(variable.path) for variable in metrics[:3]),
                expected="metrics that add up over samples, such as an accuracy",
                hint="update it after the step: a mean of losses with the loss that the step returns",
            )
        return False

    def _new_attempt(self) -> Try:
        shape, metrics = self._shape, without_norms(self.model, self._shape.carried)

        def computed(data: Any, count: Any) -> Any:
            self._trying = True
            try:
                whole = loop(self._micro, data, count, shape, self.model.trainable_variables)
            finally:
                self._trying = False
            found = self._divided(whole.values, whole.gradients)[1]
            after = {id(variable): value for variable, value in whole.updates}
            dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
            return dense, [after[id(each)] for each in metrics]

        compiled = self._compiled(computed)

        def attempt(data: Any, count: int, scalar: bool, added: bool) -> Computed:
            found, after = compiled(data, tf.constant(count))
            changes = [
                numpy.asarray(new, "float64") - each.numpy()  # booleans and unsigned counters do not subtract
                for each, new in zip(metrics, as_arrays(after), strict=True)
            ]
            return Computed(gradient_arrays(found), changes)

        return Try(attempt)

    def _build(self, data: Any) -> None:
        if self.model.built and self._learning == learning(self.model):
            return
        if not self.model.built:
            self._loss_fn(few_of(data))
        elif self._learning is not None:  # frozen or thawed since: other weights have gradients
            self._forget()
        self._memory = memory_of(self.model)
        self._learning = learning(self.model)

    def compute_whole(self, data: Any, room: Any) -> Any:
        """Loss and gradients at once."""
        rows = rows_of(data)
        micro = self._micro(data, (), rows, rows)
        values = _with_weight(micro.values)
        loss, found = self._divided(values, micro.gradients)
        return self._commit(loss, found, micro.scope.updates(), room)

    def compute_split(self, data: Any, room: Any, count: Any) -> Any:
        """The same, added up over micro-batches."""
        whole = loop(self._micro, data, count, self._shape, self.model.trainable_variables)
        loss, found = self._divided(_with_weight(whole.values), whole.gradients)
        return self._commit(loss, found, whole.updates, room)

    def _micro(self, part: Any, state: Iterable[Any], rows: Any, all_rows: Any) -> Micro:
        with Deferred(state) as scope:
            with tf.GradientTape() as tape:
                made = self._loss_fn(part)
                loss, weight = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
                loss = _checked(loss)
                if weight is None and self._reduction == "mean":
                    loss *= tf.cast(rows, loss.dtype) / tf.cast(all_rows, loss.dtype)
                if self._trying:
                    loss *= tf.cast(stretch(), loss.dtype)
            refuse_own_writes(self.model.trainable_variables, scope.updates())
            found = tape.gradient(loss, self.model.trainable_variables)
        values = [loss] if weight is None else [loss, tf.cast(weight, loss.dtype)]
        return Micro(found, values, [rows], [], scope)

    def _divided(self, values: list[Any], found: list[Any]) -> tuple[Any, list[Any]]:
        if len(values) == 1:
            return values[0], found
        total, weight = values
        return total / weight, [None if g is None else _over(g, weight) for g in found]

    def _commit(self, loss: Any, found: list[Any], updates: list[tuple[Any, Any]], room: Any) -> Any:
        refuse_own_writes(self.model.trainable_variables, updates)
        self._wrote = [variable for variable, _ in updates]
        computed = [g.values if isinstance(g, tf.IndexedSlices) else g for g in found if g is not None]
        with tf.control_dependencies([loss, *computed, *(value for _, value in updates)]):
            granted = tf.raw_ops.Empty(shape=room, dtype=tf.uint8)  # of nothing, unless it is a rehearsal
        with tf.control_dependencies([granted]):
            begun = self._stage.assign_add(2, read_value=False)
        with tf.control_dependencies([begun]):
            for variable, value in updates:
                variable.assign(value)
        return loss, found


def _checked(loss: Any) -> Any:
    value = tf.convert_to_tensor(loss) if keras.ops.is_tensor(loss) else None
    if value is None or value.shape.rank != 0 or not value.dtype.is_floating:
        received = (
            f"{type(loss).__name__}: {loss!r}"
            if value is None
            else f"shape {value.shape}, {value.dtype.name}"
        )
        raise BadLoss(
            "the loss function returned no loss", received=received[:200], expected="a scalar tensor, or (sum, weight)",
            hint="keras.ops.mean(...) of the losses of the samples",
        )  # fmt: skip
    return value


def _with_weight(values: list[Any]) -> list[Any]:
    """Checked for the whole batch: a part of it may well have no weight."""
    if len(values) == 1:
        return values
    total, weight = values
    with tf.control_dependencies([tf.debugging.assert_positive(weight, message=_NO_WEIGHT)]):
        return [tf.identity(total), tf.identity(weight)]


def _over(gradient: Any, weight: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(weight, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(weight, gradient.dtype)


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"buoy: {text}\n")
    except (OSError, AttributeError):
        pass  # stderr is closed
