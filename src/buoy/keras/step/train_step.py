"""Keras's own training step in two phases: first everything is computed and nothing written, then all of it is.

In Keras's step each variable is assigned as soon as its own gradient is there, so an out-of-memory error in an earlier
layer leaves later layers updated. Here every assignment waits for all gradients, all new BatchNorm statistics, seeds
and metrics, and for a reserve as large as the update's own temporaries; see docs/micro-batches-keras.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import (
    added_loss,
    attach_mask,
    call_in_training,
    loss_of,
    loss_tracker_of,
    mask_of,
    whole_loss,
)
from buoy.keras.exactness.rounding import stretch
from buoy.keras.step.gradient import Micro, Shape, Sum, loop, refuse_own_writes, rows_of, shape_of
from buoy.keras.step.losses import AMOUNT, ROWS, SCALAR, SUM, Measured, Tracked, shared, summed
from buoy.keras.step.snapshot import Deferred, States
from buoy.microbatch.errors import CannotSplit

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
    """Of each compiled loss; see losses.py."""
    added: bool
    """Whether layers add losses with `add_loss`."""
    vector: bool
    """Whether the total is a loss without reduction."""
    outputs: Any
    """A prediction: its structure and its masks."""


class TrainStep:
    """The step of one compiled model. Its methods build graphs; transaction.py runs them and deals with failure."""

    def __init__(self, model: Any, stage: Any, states: States) -> None:
        self.model = model
        self.stage = stage
        """Grows by one when all is computed, and by one more when writing begins."""
        self.states = states
        """What else the forward pass writes."""
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
        total, *parts = _tracked(whole.values, facts.vector)
        with Deferred(whole.updates) as scope:
            own, *others = _trackers(model)
            _track(own, total, rows_of(x))
            for tracker, part in zip(others, parts, strict=False):
                _track(tracker, part, keras.tree.flatten(x)[0].shape[0])
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
        micro, total, outputs = self._micro(data, (), rows, rows, nothing, {}, noted)
        self.written = list(micro.scope.written.values())
        return Facts(
            shape=shape_of(
                micro,
                [variable for tracker in _trackers(self.model) for variable in tracker.variables],
                self.states.restarted(micro.scope.written.values()),
            ),
            kinds=[noted[index].kind for index in sorted(noted)],
            added=bool(micro.scope.losses),
            vector=total.elements is not None,
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
    ) -> tuple[Micro, Tracked, Any]:  # fmt: skip
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

        parts: dict[int, Tracked] = {}
        with Deferred(state) as scope:
            with tf.GradientTape() as tape:
                outputs = call_in_training(model, x)
                if self.opaque:
                    loss = whole_loss(model, x, y, outputs, sample_weight)
                    total = summed(loss * tf.cast(share_of(0, Measured(SCALAR, None)), loss.dtype))
                else:
                    # As Keras's own compute_loss adds up, with each part counted for its share of the whole batch.
                    total = Tracked(tf.zeros(()), None)
                    if (compiled := loss_of(model)) is not None:
                        with shared(compiled, share_of, parts):
                            total = summed(compiled(y, outputs, sample_weight))
                    added = {id(loss) for loss in scope.losses}
                    for loss in model.losses:
                        own = tf.where(sums.added, one, share) if id(loss) in added else share
                        value = added_loss(model, loss)
                        total.total += tf.cast(value * tf.cast(own, value.dtype), total.total.dtype)
                scaled = self._scaled(total.total)
            refuse_own_writes(model.trainable_weights, scope.updates())
            gradients = tape.gradient(scaled, model.trainable_weights)
            if self.streamed:
                model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        values = [one for tracked in (total, *(parts[n] for n in sorted(parts))) for one in _values(tracked)]
        sizes = [rows, *(_size(noted[n]) for n in sorted(noted))]
        micro = Micro(gradients, values, sizes, [] if self.streamed else _leaves(outputs), scope)
        return micro, total, outputs

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
    """Whether a person's own method stands in place of Keras's, in the model's class or in this one model."""
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


def _values(tracked: Tracked) -> list[Any]:
    elements = tf.constant(0) if tracked.elements is None else tracked.elements
    return [tracked.total, elements]


def _tracked(values: list[Any], vector: bool) -> list[Tracked]:
    pairs = zip(values[::2], values[1::2], strict=True)
    return [Tracked(total, elements if vector else None) for total, elements in pairs]


def _track(tracker: Any, tracked: Tracked, rows: Any) -> None:
    value = tracked.total
    # Keras tells its tracker the whole vector; only its mean and length matter there.
    if tracked.elements is not None:
        mean = value / tf.cast(tf.maximum(tracked.elements, 1), value.dtype)
        value = tf.fill([tracked.elements], mean)
    tracker.update_state(value, sample_weight=rows)


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
