"""A batch computed in micro-batches, one after the other inside the graph, without writing to any variable.

How much of the whole batch's loss each micro-batch's loss stands for: a Keras loss is a numerator over a denominator
(samples, unmasked tokens, the sum of sample weights), so the gradient of the whole batch is the sum over micro-batches
of the gradient of `loss * (its denominator / the whole batch's)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import losses_replaced, mask_of
from buoy.keras.step.snapshot import Deferred
from buoy.microbatch.errors import CannotSplit


@dataclass(slots=True)
class Micro:
    """One micro-batch, computed."""

    gradients: list[Any]
    values: list[Any]
    """Numbers that add up to the whole batch's."""
    sizes: list[Any]
    """Numbers to be looked at side by side afterwards."""
    kept: list[Any]
    """Tensors with a row per sample, to be joined."""
    scope: Deferred


@dataclass(slots=True)
class Shape:
    """What one micro-batch looks like, as far as the loop must know before it is built."""

    carried: list[Any]
    """Variables that a micro-batch writes and the next one reads: BatchNorm statistics, seeds, metrics."""
    gradients: list[Any]
    """Per weight: None for no gradient, else the dtype; embeddings give slices."""
    slices: list[bool]
    values: list[Any]
    sizes: int
    kept: list[Any]


@dataclass(slots=True)
class Sum:
    """The whole batch, computed."""

    gradients: list[Any]
    values: list[Any]
    sizes: Any
    """One row per micro-batch."""
    kept: list[Any]
    updates: list[tuple[Any, Any]]


Compute = Callable[[Any, Iterable[tuple[Any, Any]], Any, Any], Micro]
"""(part of the batch, state from the micro-batch before, its samples, all samples) -> Micro"""


def shape_of(micro: Micro, not_carried: Iterable[Any] = ()) -> Shape:
    """Note what the loop must know."""
    skipped = {id(variable) for variable in not_carried}
    return Shape(
        carried=[variable for key, variable in micro.scope.written.items() if key not in skipped],
        gradients=[None if gradient is None else gradient.dtype for gradient in micro.gradients],
        slices=[isinstance(gradient, tf.IndexedSlices) for gradient in micro.gradients],
        values=[value.dtype for value in micro.values],
        sizes=len(micro.sizes),
        kept=[(leaf.dtype, leaf.shape[1:]) for leaf in micro.kept],
    )


def rows_of(data: Any) -> Any:
    """The number of samples, as a scalar tensor."""
    return tf.shape(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None))[0]


def part_of(data: Any, first: Any, last: Any) -> Any:
    """The samples from `first` up to `last`."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[first:last], data)


def loop(compute: Compute, data: Any, count: Any, shape: Shape, weights: list[Any]) -> Sum:
    """Compute `count` nearly equal parts of the batch and add them up."""
    rows = rows_of(data)
    dense = [
        index for index, dtype in enumerate(shape.gradients) if dtype is not None and not shape.slices[index]
    ]
    sliced = [index for index, is_slices in enumerate(shape.slices) if is_slices]

    def growing(dtype: Any, row: Iterable[int | None]) -> Any:
        return tf.TensorArray(dtype, size=count, infer_shape=False, element_shape=(None, *row))

    start = {
        "index": tf.constant(0),
        "dense": [tf.zeros(weights[n].shape, shape.gradients[n]) for n in dense],
        # Kept as slices, since clipping and some optimizers treat them differently from dense gradients.
        "slices": [growing(shape.gradients[n], weights[n].shape[1:]) for n in sliced],
        "indices": [growing(tf.int64, ()) for _ in sliced],
        "state": [tf.convert_to_tensor(variable.value) for variable in shape.carried],
        "values": [tf.zeros((), dtype) for dtype in shape.values],
        "sizes": tf.TensorArray(tf.float64, size=count, element_shape=(shape.sizes,)),
        "kept": [growing(dtype, row) for dtype, row in shape.kept],
    }

    def body(now: dict[str, Any]) -> list[dict[str, Any]]:
        index = now["index"]
        first, last = index * rows // count, (index + 1) * rows // count
        before = list(zip(shape.carried, now["state"], strict=True))
        micro = compute(part_of(data, first, last), before, last - first, rows)
        noted = {id(variable): value for variable, value in micro.scope.updates()}
        return [
            {
                "index": index + 1,
                "dense": [old + micro.gradients[n] for old, n in zip(now["dense"], dense, strict=True)],
                "slices": _write(now["slices"], index, [micro.gradients[n].values for n in sliced]),
                "indices": _write(
                    now["indices"], index, [tf.cast(micro.gradients[n].indices, tf.int64) for n in sliced]
                ),
                "state": [noted.get(id(variable), value) for variable, value in before],
                "values": [old + new for old, new in zip(now["values"], micro.values, strict=True)],
                "sizes": now["sizes"].write(
                    index, tf.stack([tf.cast(size, tf.float64) for size in micro.sizes])
                ),
                "kept": _write(now["kept"], index, micro.kept),
            }
        ]

    (end,) = tf.while_loop(lambda now: now["index"] < count, body, [start], parallel_iterations=1)
    gradients: list[Any] = [None] * len(weights)
    for n, value in zip(dense, end["dense"], strict=True):
        gradients[n] = value
    for n, values, indices in zip(sliced, end["slices"], end["indices"], strict=True):
        gradients[n] = tf.IndexedSlices(
            values.concat(), indices.concat(), tf.constant(list(weights[n].shape), tf.int64)
        )
    return Sum(
        gradients=gradients,
        values=end["values"],
        sizes=end["sizes"].stack(),
        kept=[array.concat() for array in end["kept"]],
        updates=list(zip(shape.carried, end["state"], strict=True)),
    )


def _write(arrays: list[Any], index: Any, values: list[Any]) -> list[Any]:
    return [array.write(index, value) for array, value in zip(arrays, values, strict=True)]


class HoldsNotBack(CannotSplit):
    """The forward pass itself writes what only the optimizer may write."""


_WRITES = (
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceScatterAdd",
    "ResourceScatterUpdate",
)


def refuse_own_writes(weights: list[Any], updates: list[tuple[Any, Any]]) -> None:
    """Say so when the forward pass writes what cannot be held back; called before anything else is written."""
    trainable = {id(weight) for weight in weights}
    found = [variable.path for variable, _ in updates if id(variable) in trainable]
    if not tf.executing_eagerly():
        operations = tf.compat.v1.get_default_graph().get_operations()
        found += [operation.name for operation in operations if operation.type in _WRITES]
    if found:
        raise HoldsNotBack(
            "a layer writes to a weight, or to a variable that is not Keras's, during the forward pass",
            received=found[0],
            expected="variables of Keras that only the optimizer trains",
            hint="without `micro_batch=` it is trained as Keras does it, with no recovery from out-of-memory",
        )


# -- the share of a micro-batch in the loss of the whole ----------------------------------------------------------

SUM = "sum"
"""Nothing is divided: each micro-batch counts whole."""
ROWS = "rows"
"""Divided by the number of values, which the samples share equally."""
AMOUNT = "amount"
"""Divided by something that varies from sample to sample: unmasked tokens, sample weights."""
SCALAR = "scalar"
"""A function of the user's returned one number; only the probe can tell what it was divided by."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One compiled loss on one micro-batch."""

    kind: str
    amount: Any
    """The denominator, as a scalar tensor; None where nothing is divided or nobody can see it."""


Share = Callable[[int, Measured], Any]


def shared(compiled: Any, share: Share, tracked: dict[int, Any]) -> AbstractContextManager[None]:
    """Within it each compiled loss is multiplied by its share; what its tracker should hear goes into `tracked`."""
    return losses_replaced(compiled, lambda index, loss: _counted(index, loss, share, tracked))


def _counted(index: int, loss: Any, share: Share, tracked: dict[int, Any]) -> Callable[..., Any]:
    def counted(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value, measured = measure(loss, y_true, y_pred, sample_weight)
        refuse_unreduced(value)
        tracked[index] = value * tf.cast(share(index, measured), value.dtype)
        return tracked[index]

    return counted


def refuse_unreduced(loss: Any) -> None:
    """Keras trains the sum of a loss that is no single number, and shows its mean."""
    if loss.shape.rank != 0:
        raise CannotSplit(
            "a loss without reduction cannot be split into micro-batches",
            received=f"a loss of shape {loss.shape}",
            expected="one number",
            hint='`reduction="sum"` trains the same gradient; a mean is the default',
        )


def measure(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Measured]:
    """A loss's value, and what it was divided by."""
    seen: list[Any] = []
    original = getattr(loss, "call", None)
    if original is None or type(loss).__call__ is not keras.losses.Loss.__call__:
        return loss(y_true, y_pred, sample_weight), Measured(SCALAR, None)

    def call(y_true: Any, y_pred: Any) -> Any:
        seen.append(original(y_true, y_pred))
        return seen[-1]

    loss.call = call
    try:
        value = loss(y_true, y_pred, sample_weight)
    finally:
        del loss.call
    values = tf.convert_to_tensor(seen[-1])
    if loss.reduction == "sum" and values.shape.rank != 0:
        return value, Measured(SUM, None)
    if values.shape.rank == 0:
        return value, Measured(SCALAR, None)
    mask = _both(mask_of(y_pred), mask_of(seen[-1]))
    if loss.reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        return value, Measured(AMOUNT, _weight_total(sample_weight, mask, value.dtype))
    if mask is not None:
        return value, Measured(AMOUNT, tf.reduce_sum(tf.cast(mask, value.dtype)))
    return value, Measured(ROWS, tf.size(values))


def _both(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return tf.logical_and(tf.cast(first, tf.bool), tf.cast(second, tf.bool))


def _weight_total(sample_weight: Any, mask: Any, dtype: Any) -> Any:
    if mask is None:
        return tf.reduce_sum(tf.cast(sample_weight, dtype))
    weights = tf.cast(mask, dtype)
    if sample_weight is not None:
        given = tf.cast(sample_weight, dtype)
        while given.shape.rank < weights.shape.rank:
            given = given[..., tf.newaxis]
        weights = weights * given
    return tf.reduce_sum(weights)
