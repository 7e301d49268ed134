"""A batch computed in micro-batches, one after the other inside the graph, without writing to any variable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

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
    restarted: frozenset[int]
    """Which of them (by id) every micro-batch finds as they were before the step: what a step moves once."""
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


def shape_of(micro: Micro, not_carried: Iterable[Any] = (), restarted: frozenset[int] = frozenset()) -> Shape:
    """Note what the loop must know."""
    skipped = {id(variable) for variable in not_carried}
    return Shape(
        carried=[variable for key, variable in micro.scope.written.items() if key not in skipped],
        restarted=restarted,
        gradients=[None if gradient is None else gradient.dtype for gradient in micro.gradients],
        slices=[isinstance(gradient, tf.IndexedSlices) for gradient in micro.gradients],
        values=[value.dtype for value in micro.values],
        sizes=len(micro.sizes),
        kept=[(leaf.dtype, leaf.shape[1:]) for leaf in micro.kept],
    )


def rows_of(data: Any) -> Any:
    """The number of samples, as a scalar tensor."""
    return tf.shape(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None))[0]


def cut(data: Any, first: Any, last: Any) -> Any:
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
        states = zip(shape.carried, start["state"], now["state"], strict=True)
        before = [
            (variable, first if id(variable) in shape.restarted else last) for variable, first, last in states
        ]
        micro = compute(cut(data, first, last), before, last - first, rows)
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
