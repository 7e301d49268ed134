"""A step computed on a few samples and not done: what it needs is measured that way before the whole batch is tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from buoy.keras.data.pipeline import hidden_operations
from buoy.keras.step.gradient import cut

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


Begin = Callable[[], object]
"""Called when all is ready and the computing begins."""


class Rehearsal:
    """The graphs of one step for any number of samples; made when first needed."""

    def __init__(self) -> None:
        self._traced: list[tuple[Any, Any, Any]] = []
        self._checked: list[Any] = []

    def whole(self, function: Any, data: Any, samples: int, begin: Begin) -> None:
        """Compute `function(data, reserve)` on the first samples; always raises what ends it."""
        self._run(function, data, samples, begin)

    def split(self, function: Any, data: Any, samples: int, begin: Begin) -> None:
        """Compute `function(data, reserve, count)` on two parts of so many samples, where there are as many.

        One part alone would need less: from the second on, the gradients of the parts before it are there too.
        """
        rows = next(leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None)
        count = 2 if 2 * samples <= rows + 1 else 1
        self._run(function, data, min(rows, count * samples), begin, tf.constant(count))

    def _run(self, function: Any, data: Any, samples: int, begin: Begin, *more: Any) -> None:
        traced = self._graph(function, data, more)
        part = cut(data, 0, samples)  # a copy that the step itself does not make
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


def loose(spec: Any) -> Any:
    """The same arrays with any number of samples; None where one has no samples."""
    leaves = keras.tree.flatten(spec)
    if not all(leaf is None or _has_rows(leaf) for leaf in leaves):
        return None
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), spec
    )


def exact(data: Any) -> Any:
    """The arrays as they are; None where something is no array."""
    leaves = keras.tree.flatten(data)
    if not all(leaf is None or _has_rows(leaf) for leaf in leaves):
        return None
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), data
    )


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
    spec = keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.TensorSpec((samples, *leaf.shape[1:]), leaf.dtype), data
    )
    graph = tf.function(function, autograph=False).get_concrete_function(spec, ROOM).graph
    # A weight that is read is there already.
    made = [op for op in graph.get_operations() if op.type not in ("Empty", "ReadVariableOp")]
    outputs = [out for op in made for out in op.outputs]
    return sum(
        math.prod(out.shape) * (out.dtype.size or 0) for out in outputs if out.shape.is_fully_defined()
    )


def repeatable(traced: Any) -> bool:
    """Whether computing it once more is unnoticed: no hidden generator moves on, no Python of the user's is called."""
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
