"""Is the sum over micro-batches the whole batch's gradient, for this model and this loss? Tried on a few samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy.keras import batch_norm
from buoy.keras.micro_batches import cut
from buoy.keras.quiet import same_for_every_sample
from buoy.microbatch.errors import CannotSplit
from buoy.microbatch.oom import is_oom

SAMPLES = 5
"""Cut into 2 and 3: an even cut cannot tell a mean from a mean of means."""
FEWEST = 3
"""Where more do not fit."""

# Relative, for arithmetic of each precision: rounding alone stays below, a wrong weight is far above.
_FLOORS = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-2, "bfloat16": 5e-2}
_MASK_BLUR = 1e-6
"""Keras before 3.13 adds an epsilon of 1e-7 to the number of unmasked values it divides by, in the whole batch once and
in each part of it again. Only in float64 does that show."""
_ORDERS = 4.0
"""Times the difference that another order of the same samples makes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a try gave: gradients, and the metrics it would write, as arrays."""

    gradients: list[Any]
    metrics: list[Any]


Try = Callable[[Any, int, bool, bool], Answer]
"""(samples, micro-batches, scalar losses are sums, added losses are sums) -> Answer; writes nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probe can say."""

    scalar_sums: bool
    added_sums: bool
    metrics_add_up: bool
    """Whether metrics updated per micro-batch end as those updated once."""
    error: float
    allowed: float


def few_of(data: Any) -> Any:
    """The first samples of a batch; where they are copies of one, others too, or copies that are told apart.

    Copies cannot show whether a model compares its samples: blank images at the start of a batch, a batch of zeros.
    """
    whole = _map(tf.convert_to_tensor, data)
    few = _map(lambda leaf: leaf[:SAMPLES], whole)
    if not _are_copies(_map(lambda leaf: leaf[:FEWEST], few)):
        return few
    unlike = [row for leaf in _inputs(whole) for row in _rows_unlike_the_first(leaf)]
    if unlike:
        rows = [0, *sorted(set(unlike))[: SAMPLES - 1]]
        rows += [row for row in range(1, len(_inputs(whole)[0])) if row not in rows][: SAMPLES - len(rows)]
        return _map(lambda leaf: tf.gather(leaf, rows), whole)
    inputs = {id(leaf) for leaf in _inputs(few)}
    return _map(lambda leaf: _spread(leaf) if id(leaf) in inputs else leaf, few)


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), data)


def _inputs(data: Any) -> list[Any]:
    """What the model reads, not what it is to say."""
    inputs = data[0] if isinstance(data, tuple | list) else data
    return [leaf for leaf in keras.tree.flatten(inputs) if leaf is not None]


def _are_copies(few: Any) -> bool:
    inputs = _inputs(few)
    return bool(inputs) and len(inputs[0]) > 1 and not any(_rows_unlike_the_first(leaf) for leaf in inputs)


def _rows_unlike_the_first(leaf: Any) -> list[int]:
    unlike = tf.reshape(leaf != leaf[:1], [len(leaf), -1])
    return [int(row) for row in tf.where(tf.reduce_any(unlike, axis=1))[:, 0]]


def _spread(leaf: Any) -> Any:
    """The same numbers and a little more in each, another little in every sample; other kinds of input as they are."""
    if not leaf.dtype.is_floating:
        return leaf
    size = float(tf.reduce_max(tf.abs(tf.cast(leaf, "float64")))) or 1.0
    more = numpy.random.default_rng(0).uniform(0.0, size, leaf.shape)
    return leaf + tf.cast(more, leaf.dtype)


def probe(attempt: Try, few: Any, model: Any, unknown: tuple[bool, bool] = (False, False)) -> Finding:
    """Compare whole and split, under each reading of the losses whose reduction cannot be seen (scalar, added).

    `CannotSplit` when no reading gives the same gradient.
    """
    if _are_copies(few):
        raise _untried("samples that are all alike")
    backwards = _map(lambda leaf: leaf[::-1], few)
    try:
        with same_for_every_sample(), batch_norm.at_rest(model):
            finding = _compare(attempt, few, backwards, _floor(_precision(model)), unknown)
    except Exception as error:
        rows = len(keras.tree.flatten(few)[0])
        if rows <= FEWEST or not is_oom(error):
            raise
        finding = None
    if finding is None:  # outside `except`, where nothing holds what the failed try held
        return probe(attempt, cut(few, 0, FEWEST), model, unknown)
    if finding.error > finding.allowed:
        raise CannotSplit(
            "in micro-batches this model and loss give another gradient than on the whole batch",
            received=f"a difference of {finding.error:.1g} between a few samples at once and in two parts",
            expected=f"at most {finding.allowed:.1g}",
            hint="what compares samples with each other, or draws random numbers without a keras SeedGenerator, "
                 "needs the whole batch: ask for a smaller one"
                 + ("; losses added by layers must all be means, or all be sums (as activity regularizers are before "
                    "Keras 3.14)" if unknown[1] else ""),
        )  # fmt: skip
    return finding


def _compare(
    attempt: Try, few: Any, backwards: Any, floor: float, unknown: tuple[bool, bool]
) -> Finding:  # fmt: skip
    whole = attempt(few, 1, False, False)
    if not any(numpy.any(gradient) for gradient in whole.gradients):
        raise _untried("a gradient of zero for its first samples")
    other_order = attempt(backwards, 1, False, False)
    allowed = max(floor, _ORDERS * distance(whole.gradients, other_order.gradients))
    findings = []
    for scalar in (False, True) if unknown[0] else (False,):
        for added in (False, True) if unknown[1] else (False,):
            split = attempt(few, 2, scalar, added)
            error = distance(whole.gradients, split.gradients)
            add_up = distance(whole.metrics, split.metrics) <= allowed
            findings.append(Finding(scalar, added, add_up, error, allowed))
    return min(findings, key=lambda finding: finding.error)


def _untried(received: str) -> CannotSplit:
    return CannotSplit(
        "whether micro-batches give the same gradient could not be tried",
        received=received,
        expected="samples that differ, with a gradient to compare",
        hint="shuffle the data, or ask for a smaller batch",
    )


def distance(first: list[Any], second: list[Any]) -> float:
    """The largest difference, relative to each array's size; arrays that are almost nothing count by the whole's."""
    norms = [float(numpy.linalg.norm(numpy.asarray(a, "float64").ravel())) for a in first]
    whole = sum(norm**2 for norm in norms) ** 0.5
    largest = 0.0
    for norm, a, b in zip(norms, first, second, strict=True):
        difference = float(
            numpy.linalg.norm((numpy.asarray(a, "float64") - numpy.asarray(b, "float64")).ravel())
        )
        if not isfinite(difference):
            return inf
        if difference:
            largest = max(largest, difference / max(norm, 1e-3 * whole, 1e-30))
    return largest


def as_arrays(tensors: list[Any]) -> list[Any]:
    """For comparison: dense, as numpy; no gradient is left out."""
    return [tf.convert_to_tensor(tensor).numpy() for tensor in tensors if tensor is not None]


def _floor(precision: str) -> float:
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    return max(_FLOORS[precision], _MASK_BLUR if version < (3, 13) else 0.0)


def _precision(model: Any) -> str:
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    return next(
        (dtype for dtype in ("bfloat16", "float16", "float32", "float64") if dtype in dtypes), "float32"
    )
