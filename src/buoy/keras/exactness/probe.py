"""Do the micro-batches have the whole batch's gradient, for this model and this loss? Keras's part of the ladder.

The decisions are those of `microbatch/exactness`, one ladder for every framework; here is how Keras computes on a few
samples. What only Keras asks beside: whether a loss that nobody can see into is a sum or a mean, and whether metrics
add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import layers_of, mask_blur
from buoy.keras.exactness import randomness
from buoy.keras.exactness.rounding import elsewhere, nudged, stretch
from buoy.keras.exactness.samples import FEWEST, SAMPLES, are_copies, repeated
from buoy.keras.step.gradient import part_of
from buoy.keras.step.refusals import norms_at_rest
from buoy.microbatch.errors import CannotSplit, is_oom
from buoy.microbatch.exactness import Answer, Gradient, PartError, Trial, compare, judge

# Relative, for arithmetic of each precision: rounding alone stays below, a wrong weight is far above.
_FLOORS = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class Computed:
    """What a try gave, as arrays: gradients, and the metrics it would write."""

    gradients: list[Any]
    metrics: list[Any]


Compute = Callable[[Any, int, bool, bool], Computed]
"""(samples, micro-batches, scalar losses are sums, added losses are sums) -> Computed; writes nothing."""
Reading = tuple[bool, bool]
"""Scalar losses are sums, added losses are sums."""


class Try:
    """A function that computes a few samples, and what it draws."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.drawn: set[str] = set()
        """Known once its graph is traced, and for good."""

    def __call__(self, samples: Any, count: int, reading: Reading) -> Computed:
        """In so many micro-batches."""
        with randomness.noted() as drawn:
            made = self._compute(samples, count, *reading)
        self.drawn |= set(drawn)
        randomness.refuse_others(self.drawn)
        return made


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probe found, of a batch that may be split."""

    reading: Reading
    metrics_add_up: bool
    """Whether metrics updated per micro-batch end as those updated once."""


class Untried(CannotSplit):
    """These samples show nothing; others may."""


class KerasBackend:
    """A `microbatch.exactness.Backend`, for one reading of the losses whose reduction cannot be seen."""

    is_deterministic = False
    """TensorFlow's threads add up in any order."""

    def __init__(self, attempt: Try, model: Any, reading: Reading, *, metrics: bool) -> None:
        self._try, self._model, self._reading, self._with_metrics = attempt, model, reading, metrics
        self._precision = precision_of(model)
        self.tolerance = max(_FLOORS[self._precision], mask_blur())

    @property
    def drew(self) -> bool:
        """Whether something random was computed."""
        return bool(self._try.drawn)

    def gradient(self, samples: Any, sizes: Sequence[int], nudge: int = 0) -> Gradient:
        """Of these samples, in so many nearly equal micro-batches."""
        if nudge:
            with nudged(self._model, samples, self._precision, nudge - 1) as moved:
                made = self._try(moved, len(sizes), self._reading)
        else:
            made = self._try(samples, len(sizes), self._reading)
        return Gradient(made.gradients, made.metrics if self._with_metrics else [])

    @contextmanager
    def disturbed(self, samples: Any) -> Iterator[Any]:
        """Whether a batch may be split does not depend on the weights: inside they are others."""
        with elsewhere(self._model):
            yield samples

    def other_draws(self) -> list[AbstractContextManager[Any]]:
        """The other end of what each draw may be."""
        return [randomness.on_side(True)]

    def size(self, array: Any) -> float:
        """Its norm, in double precision; whole copies may be what there is no memory for."""
        flat = numpy.asarray(array).reshape(-1)
        return _length([float(numpy.linalg.norm(flat[each].astype("float64"))) for each in _pieces(flat)])

    def apart(self, one: Any, other: Any) -> float:
        """The norm of the difference."""
        first, second = numpy.asarray(one).reshape(-1), numpy.asarray(other).reshape(-1)
        if first.shape != second.shape:
            return float("inf")
        return _length([self.size(first[each].astype("float64") - second[each]) for each in _pieces(first)])


def probe(
    attempt: Try, few: Any, model: Any, unknown: Reading = (False, False), *, again: bool = False
) -> Finding:
    """Compare whole and parts, under each reading of the losses whose reduction cannot be seen (scalar, added).

    `CannotSplit` when no reading gives the same gradient; `Untried` when these samples cannot show it. Where memory is
    short, fewer samples do, unless it was asked before.
    """
    if are_copies(few):
        raise _untried("samples that are all the same")
    try:
        with randomness.same_for_every_sample(), norms_at_rest(model):
            return _found(attempt, few, model, unknown)
    except Exception as error:
        if again or _rows(few) <= FEWEST or not is_oom(error):
            raise
    few = part_of(few, 0, FEWEST)
    return probe(attempt, few, model, unknown)  # here nothing holds what the failed try held


def _found(attempt: Try, few: Any, model: Any, unknown: Reading) -> Finding:
    trials = [Trial(each, _halves(each)) for each in (few, *repeated(few))]
    readings = [
        (scalar, added)
        for scalar in ((False, True) if unknown[0] else (False,))
        for added in ((False, True) if unknown[1] else (False,))
    ]
    answer = Answer.NOT_SHOWN
    for metrics in (True, False):  # metrics that do not add up are no reason against a split
        for reading in readings:
            backend = KerasBackend(attempt, model, reading, metrics=metrics)
            answer = _asked(lambda backend=backend: judge(backend, trials))  # type: ignore[misc]
            if answer is Answer.SAME:
                return Finding(reading, metrics)
            if answer is Answer.NOT_AGAIN:
                break
    raise _refusal(answer, unknown[1])


def probe_many(attempt: Try, many: Any, model: Any) -> None:
    """Compare as many samples as are computed at once with two halves of them, where losses are known to be what.

    A layer that has room for so many samples, or a loss of the eight hardest, does not show in five.
    """
    if _rows(many) <= SAMPLES:
        return
    backend = KerasBackend(attempt, model, (False, False), metrics=False)
    with randomness.same_for_every_sample(), norms_at_rest(model):
        answer = _asked(lambda: compare(backend, Trial(many, _halves(many))))
    if answer in (Answer.DIFFERENT, Answer.NOT_AGAIN):
        raise _refusal(answer, False)


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


def _asked(ask: Callable[[], Answer]) -> Answer:
    """What a part of the samples raises is raised as it is: it may be a check inside the graph, with its own words."""
    try:
        return ask()
    except PartError as failed:
        raise failed.error from None


def _refusal(answer: Answer, added: bool) -> CannotSplit:
    if answer is Answer.NOT_SHOWN:
        return _untried("a gradient that is zero, only rounding error, or not finite, for its samples")
    return CannotSplit(
        "splitting this batch would change the gradient",
        received="the same samples give a different gradient each time: it depends on more than the "
                 "batch and the weights"
        if answer is Answer.NOT_AGAIN
        else "the gradient of the batch differs from that of its micro-batches: samples depend on each other",
        expected="a gradient that is a sum over samples",
        hint="what compares samples with each other, or mixes them, needs the whole batch: use a smaller one; for a "
             "loss divided by the number of tokens or of positives, or by the sum of class weights, give "
             "`(sum, weight)` to `buoy.keras.gradients`, the weight being what it is divided by; in `fit`, use a "
             "Keras mask or `class_weight=`"
             + ("; losses added by layers must all be means, or all be sums (as activity regularizers are before "
                "Keras 3.14)" if added else ""),
    )  # fmt: skip


def _untried(received: str) -> Untried:
    return Untried(
        "buoy cannot verify that splitting this batch keeps its gradient",
        received=received,
        expected="samples that differ, with a gradient to compare",
        hint="shuffle the data, or use a smaller batch",
    )


def _rows(few: Any) -> int:
    return len(keras.tree.flatten(few)[0])


def _halves(few: Any) -> list[int]:
    """As the graph of the step cuts them."""
    return [_rows(few) // 2, _rows(few) - _rows(few) // 2]


_PIECE = 1 << 16


def _pieces(flat: Any) -> list[slice]:
    return [slice(start, start + _PIECE) for start in range(0, len(flat), _PIECE)]


def _length(parts: list[float]) -> float:
    return float(numpy.linalg.norm(parts))


def gradient_arrays(gradients: list[Any]) -> list[Any]:
    """For comparison: those of the loss itself, where it was stretched."""
    by = float(stretch().numpy())
    return [array if by == 1 else (array / by).astype(array.dtype) for array in as_arrays(gradients)]


def as_arrays(tensors: list[Any]) -> list[Any]:
    """For comparison: dense, as numpy, on a CPU without a copy; no gradient is left out."""
    return [numpy.asarray(tf.convert_to_tensor(tensor)) for tensor in tensors if tensor is not None]


def precision_of(model: Any) -> str:
    """The coarsest that a model and its loss compute with."""
    dtypes = {str(layer.compute_dtype) for layer in layers_of(model)}
    return next(
        (dtype for dtype in ("bfloat16", "float16", "float32", "float64") if dtype in dtypes), "float32"
    )
