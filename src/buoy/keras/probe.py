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
from buoy.keras.few import FEWEST, SAMPLES, are_copies, repeated
from buoy.keras.micro_batches import cut
from buoy.keras.quiet import on_side, same_for_every_sample
from buoy.keras.rounding import elsewhere, nudged, stretch
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
    """What a try gave, as arrays: gradients, the metrics it would write, and what else it would write."""

    gradients: list[Any]
    metrics: list[Any]
    states: list[tuple[Any, Any]]
    """(before, after) of each variable that is no metric: a teacher that follows the weights, a counter."""


Try = Callable[[Any, int, bool, bool], Answer]
"""(samples, micro-batches, scalar losses are sums, added losses are sums) -> Answer; writes nothing."""
Reading = tuple[bool, bool]
"""Scalar losses are sums, added losses are sums."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probe can say."""

    scalar_sums: bool
    added_sums: bool
    metrics_add_up: bool
    """Whether metrics updated per micro-batch end as those updated once."""
    states: frozenset[int]
    """The variables (by their place in `Answer.states`) that end otherwise in parts."""
    error: float
    """The difference, relative to the gradient's size, where it is farthest from what is allowed."""
    allowed: float
    blur: float = 0.0
    """How much of the whole gradient may be rounding, where that had to be asked."""

    def with_other(self, other: Finding) -> Finding:
        """The worse of two, of the same reading."""
        worse = max(self, other, key=lambda each: each.error / each.allowed)
        return replace(
            worse,
            metrics_add_up=self.metrics_add_up and other.metrics_add_up,
            states=self.states | other.states,
        )


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
    readings = [
        (scalar, added)
        for scalar in ((False, True) if unknown[0] else (False,))
        for added in ((False, True) if unknown[1] else (False,))
    ]
    try:
        with same_for_every_sample(), batch_norm.at_rest(model):
            finding = _compare(attempt, few, model, readings)
    except Exception as error:
        rows = len(keras.tree.flatten(few)[0])
        if again or rows <= FEWEST or not is_oom(error):
            raise
        finding = None
    if finding is None:  # outside `except`, where nothing holds what the failed try held
        return probe(attempt, cut(few, 0, FEWEST), model, unknown)
    _refuse(finding, unknown[1])
    return finding


def probe_many(attempt: Try, many: Any, model: Any) -> None:
    """Compare as many samples as are computed at once with two halves of them, where losses are known to be what.

    A layer that has room for so many samples, or a loss of the eight hardest, does not show in five.
    """
    if len(keras.tree.flatten(many)[0]) <= SAMPLES:
        return
    with same_for_every_sample(), batch_norm.at_rest(model):
        finding = _compare_side(attempt, many, model, [(False, False)])
    if finding is not None:
        _refuse(finding, False)


def ask_later(ask: Callable[[], object], doubt: str = "") -> None:
    """Ask of other samples than the first: they may show what those did not, and may as well show nothing.

    `doubt`: what a refusal means for the steps before.
    """
    try:
        ask()
    except Untried:
        return
    except CannotSplit as refusal:
        refusal.hint = f"{refusal.hint or ''}{doubt}"
        raise
    except Exception as error:  # what is short of memory, the step itself will meet
        if not is_oom(error):
            raise


def _refuse(finding: Finding, added: bool) -> None:
    if finding.error <= finding.allowed:
        return
    raise CannotSplit(
        "in micro-batches this model and loss give another gradient than on the whole batch",
        received=f"a difference of {finding.error:.1g} between a few samples at once and in two parts",
        expected=f"at most {finding.allowed:.1g}",
        hint="what compares samples with each other, or mixes them, needs the whole batch: ask for a smaller one; "
             "for a loss divided by the number of tokens or of positives, or by the sum of class weights, give "
             "`(sum, weight)` to `buoy.keras.gradients`, the weight being what it is divided by; in `fit`, use a "
             "Keras mask or `class_weight=`"
             + ("; losses added by layers must all be means, or all be sums (as activity regularizers are before "
                "Keras 3.14)" if added else ""),
    )  # fmt: skip


def _compare(attempt: Try, few: Any, model: Any, readings: list[Reading]) -> Finding:
    """Both sides of every draw; then samples that are in both parts, for which one reading must hold as well."""
    found: Finding | None = None
    shown = False
    for high in (False, True):
        with on_side(high):
            seen = _compare_side(attempt, few, model, readings)
        if seen is not None:
            found = seen if found is None else found.with_other(seen)
            readings, shown = [(seen.scalar_sums, seen.added_sums)], high
        if found is not None and found.error > found.allowed:
            return found
    if found is None:
        raise _untried("a gradient of zero, of rounding alone, or that is not finite, for its samples")
    for some in repeated(few):
        with on_side(shown):
            seen = _compare_side(attempt, some, model, readings)
        found = found if seen is None else found.with_other(seen)
    return found


def _compare_side(attempt: Try, few: Any, model: Any, readings: list[Reading]) -> Finding | None:
    """None where nothing was seen but rounding, or nothing at all."""
    finding = _compare_here(attempt, few, model, readings)
    if finding.blur <= LARGE or finding.error > finding.allowed:
        return finding
    # Whether a batch may be cut does not depend on the weights.
    with elsewhere(model):
        away = _compare_here(attempt, few, model, readings)
    return None if away.blur >= 1 else away


def _compare_here(attempt: Try, few: Any, model: Any, readings: list[Reading]) -> Finding:
    precision = precision_of(model)
    floor = _floor(precision)
    whole = attempt(few, 1, False, False)
    shows = any(numpy.any(gradient) for gradient in whole.gradients)
    if not shows or not all(isfinite(_size(gradient)) for gradient in whole.gradients):
        return Finding(*readings[0], False, frozenset(), 0.0, floor, blur=inf)
    splits = [(scalar, added, attempt(few, 2, scalar, added)) for scalar, added in readings]

    def nearest(examples: list[Answer]) -> Finding:
        findings = []
        for scalar, added, split in splits:
            off = farthest(whole.gradients, split.gradients, [each.gradients for each in examples], floor)
            measured = farthest(whole.metrics, split.metrics, [each.metrics for each in examples], floor)
            states = _moved_otherwise(whole.states, split.states, floor)
            findings.append(Finding(scalar, added, measured[0] <= measured[1], states, *off))
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
    apart = [_length([*map(_apart, whole.gradients, each.gradients)]) for each in examples]
    blur = max(apart) / _length([_size(gradient) for gradient in whole.gradients])
    return replace(nearest(examples), blur=TIMES * blur)


def _moved_otherwise(
    whole: list[tuple[Any, Any]], split: list[tuple[Any, Any]], floor: float
) -> frozenset[int]:
    """The variables whose way from before to after is another one; not by rounding, which is far smaller."""
    found = set()
    for number, ((before, once), (_, parts)) in enumerate(zip(whole, split, strict=True)):
        last_bit = float(numpy.finfo(once.dtype).eps) if once.dtype.kind == "f" else 0.0
        allowed = max(1e-3, 10 * floor) * _apart(once, before) + 8 * last_bit * _size(once)
        if _apart(once, parts) > allowed:
            found.add(number)
    return frozenset(found)


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


_PIECE = 1 << 16
"""So many numbers are made double precision at once: whole copies may be what there is no memory for."""


def _apart(a: Any, b: Any) -> float:
    first, second = numpy.asarray(a).reshape(-1), numpy.asarray(b).reshape(-1)
    pieces = (slice(start, start + _PIECE) for start in range(0, len(first), _PIECE))
    return _length([_size(first[each].astype("float64") - second[each]) for each in pieces])


def _size(array: Any) -> float:
    flat = numpy.asarray(array).reshape(-1)
    pieces = (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))
    return _length([float(numpy.linalg.norm(each.astype("float64"))) for each in pieces])


def _length(parts: list[float]) -> float:
    return float(numpy.linalg.norm(parts))


def gradient_arrays(gradients: list[Any]) -> list[Any]:
    """For comparison: those of the loss itself, where it was stretched."""
    by = float(stretch().numpy())
    return [array if by == 1 else (array / by).astype(array.dtype) for array in as_arrays(gradients)]


def as_arrays(tensors: list[Any]) -> list[Any]:
    """For comparison: dense, as numpy, on a CPU without a copy; no gradient is left out."""
    return [numpy.asarray(tf.convert_to_tensor(tensor)) for tensor in tensors if tensor is not None]


def _floor(precision: str) -> float:
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    return max(_FLOORS[precision], _MASK_BLUR if version < (3, 13) else 0.0)


def precision_of(model: Any) -> str:
    """The coarsest that a model and its loss compute with."""
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    if any(map(_is_ctc, keras.tree.flatten(getattr(model, "loss", None)))):
        dtypes.add("float32")  # TensorFlow computes it so, whatever it is given
    return next(
        (dtype for dtype in ("bfloat16", "float16", "float32", "float64") if dtype in dtypes), "float32"
    )


def _is_ctc(loss: Any) -> bool:
    return isinstance(loss, keras.losses.CTC) or loss is keras.losses.ctc or str(loss).lower() == "ctc"
