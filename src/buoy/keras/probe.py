"""Is the sum over micro-batches the whole batch's gradient, for this model and this loss? Tried on a few samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy.keras import batch_norm
from buoy.keras.few import FEWEST, are_copies
from buoy.keras.micro_batches import cut
from buoy.keras.quiet import same_for_every_sample
from buoy.keras.rounding import elsewhere, nudged
from buoy.microbatch.errors import CannotSplit
from buoy.microbatch.oom import is_oom
from buoy.microbatch.rounding import EXAMPLES, LARGE, TIMES

# Relative, for arithmetic of each precision: rounding alone stays below, a wrong weight is far above.
_FLOORS = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-2, "bfloat16": 5e-2}
_MASK_BLUR = 1e-6
"""Keras before 3.13 adds an epsilon of 1e-7 to the number of unmasked values it divides by, in the whole batch once and
in each part of it again. Only in float64 does that show."""


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
    """The difference, relative to the gradient's size, where it is farthest from what is allowed."""
    allowed: float
    blur: float = 0.0
    """How much of the whole gradient may be rounding, where that had to be asked."""


class Untried(CannotSplit):
    """These samples show nothing; others may."""


def probe(
    attempt: Try, few: Any, model: Any, unknown: tuple[bool, bool] = (False, False), *, again: bool = False
) -> Finding:
    """Compare whole and split, under each reading of the losses whose reduction cannot be seen (scalar, added).

    `CannotSplit` when no reading gives the same gradient; `Untried` when these samples cannot tell. Where memory is
    short, fewer samples do, unless it was asked before.
    """
    if are_copies(few):
        raise _untried("samples that are all alike")
    try:
        with same_for_every_sample(), batch_norm.at_rest(model):
            finding = _compare(attempt, few, model, unknown)
    except Exception as error:
        rows = len(keras.tree.flatten(few)[0])
        if again or rows <= FEWEST or not is_oom(error):
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
                 "needs the whole batch: ask for a smaller one; for a mean over tokens, or weighted by class, see "
                 "`(sum, weight)` of `buoy.keras.gradients`, or use `class_weight=`"
                 + ("; losses added by layers must all be means, or all be sums (as activity regularizers are before "
                    "Keras 3.14)" if unknown[1] else ""),
        )  # fmt: skip
    return finding


def ask_again(split_steps: int, ask: Callable[[], Finding]) -> Finding | None:
    """At split steps 2, 4, 8...: a later batch may show what the first did not. None when it shows nothing."""
    if split_steps < 2 or split_steps & (split_steps - 1):
        return None
    try:
        return ask()
    except Untried:
        return None
    except Exception as error:  # what is short of memory, the step itself will meet
        if not is_oom(error):
            raise
    return None


def _compare(attempt: Try, few: Any, model: Any, unknown: tuple[bool, bool]) -> Finding:
    finding = _compare_here(attempt, few, model, unknown)
    if finding.blur <= LARGE or finding.error > finding.allowed:
        return finding
    # Nothing was seen but rounding, or nothing at all. Whether a batch may be cut does not depend on the weights.
    with elsewhere(model):
        away = _compare_here(attempt, few, model, unknown)
    if away.blur >= 1:
        raise _untried("a gradient of zero, of rounding alone, or that is not finite, for its samples")
    return away


def _compare_here(attempt: Try, few: Any, model: Any, unknown: tuple[bool, bool]) -> Finding:
    precision = _precision(model)
    floor = _floor(precision)
    whole = attempt(few, 1, False, False)
    shows = any(numpy.any(gradient) for gradient in whole.gradients)
    if not shows or not all(isfinite(_size(gradient)) for gradient in whole.gradients):
        return Finding(False, False, False, 0.0, floor, blur=inf)
    readings = [
        (scalar, added, attempt(few, 2, scalar, added))
        for scalar in ((False, True) if unknown[0] else (False,))
        for added in ((False, True) if unknown[1] else (False,))
    ]

    def nearest(examples: list[Answer]) -> Finding:
        findings = []
        for scalar, added, split in readings:
            off = farthest(whole.gradients, split.gradients, [each.gradients for each in examples], floor)
            measured = farthest(whole.metrics, split.metrics, [each.metrics for each in examples], floor)
            findings.append(Finding(scalar, added, measured[0] <= measured[1], *off))
        return min(findings, key=lambda finding: finding.error / finding.allowed)

    exact = nearest([])
    if exact.error <= exact.allowed and exact.metrics_add_up:
        return exact
    examples = []
    for draw in range(EXAMPLES):
        with nudged(model, few, precision, draw) as moved:
            examples.append(attempt(moved, 1, False, False))
    if exact.error <= exact.allowed:
        return replace(exact, metrics_add_up=nearest(examples).metrics_add_up)
    joined = _joined(whole.gradients)
    blur = max(_apart(joined, _joined(each.gradients)) for each in examples) / _size(joined)
    return replace(nearest(examples), blur=TIMES * blur)


def _untried(received: str) -> Untried:
    return Untried(
        "whether micro-batches give the same gradient could not be tried",
        received=received,
        expected="samples that differ, with a gradient to compare",
        hint="shuffle the data, or ask for a smaller batch",
    )


def farthest(
    first: list[Any], second: list[Any], examples: list[list[Any]], floor: float
) -> tuple[float, float]:
    """(difference, what is allowed), both relative to the array's size, of the array where they are farthest apart.

    The examples differ from `first` by rounding alone. Arrays that are almost nothing count by the whole's size.
    """
    norms = [_size(a) for a in first]
    whole = sum(norm**2 for norm in norms) ** 0.5
    worst = (0.0, floor)
    for number, (norm, a, b) in enumerate(zip(norms, first, second, strict=True)):
        size = max(norm, 1e-3 * whole, 1e-30)
        error = _apart(a, b) / size
        allowed = floor + TIMES * max((_apart(a, each[number]) / size for each in examples), default=0.0)
        if not isfinite(error) or not isfinite(allowed):
            return inf, floor
        if error / allowed > worst[0] / worst[1]:
            worst = (error, allowed)
    return worst


def _apart(a: Any, b: Any) -> float:
    return _size(numpy.asarray(a, "float64") - numpy.asarray(b, "float64"))


def _joined(arrays: list[Any]) -> Any:
    return numpy.concatenate([numpy.asarray(array, "float64").ravel() for array in arrays])


def _size(array: Any) -> float:
    return float(numpy.linalg.norm(numpy.asarray(array, "float64").ravel()))


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
