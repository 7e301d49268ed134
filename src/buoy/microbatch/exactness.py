"""Is the gradient of the micro-batches that of the whole batch? One ladder for every framework.

A few samples are computed as a whole and in parts. Equal gradients are the only proof: whatever is not shown to be
equal is refused. A framework takes part with a `Backend`; everything here works on its answers alone.

How much of a difference may be rounding is measured, by computing the whole again with every number moved by its last
bit. Moves at random do not show it where thousands of equal numbers are added one after the other, as the gradient of a
bias behind a mean over all pixels is: each addition errs to the same side. So the loss is also taken times a number,
and the gradient divided by it: that is the same, whatever is computed, but for rounding, which is another one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from buoy.microbatch.errors import BadLoss
from buoy.microbatch.oom import is_oom

EXAMPLES = 4
"""How often rounding is measured."""
STRETCHES = (0.83, 0.71, 0.59, 0.93)
"""What the loss is taken times, in each example. Below 1, as half precision may overflow; and no power of 2."""
TIMES = 6.0
"""Of the largest example: others are larger, and an array of one number may show next to none by chance."""
LARGE = 1e-2
"""Where more than this of a gradient is rounding, a comparison shows nothing."""
KINDS = 64
"""More kinds of steps than this are counted together."""


@dataclass
class Gradient:
    """What one computation gave, as arrays of the framework."""

    arrays: list[Any]
    """Of each weight."""
    beside: list[Any] = field(default_factory=list)
    """What else must be equal but for rounding: buffers, metrics."""
    left: list[Any] = field(default_factory=list)
    """What must be equal to the last bit: weights that the computation has changed."""


class Backend(Protocol):
    """What a framework gives to the ladder.

    Each computation starts from the same weights, buffers and random numbers, and leaves all of them as they were.
    """

    @property
    def tolerance(self) -> float:
        """Relative: rounding of the coarsest numbers that were computed with stays below it."""

    @property
    def is_deterministic(self) -> bool:
        """Whether the same computation gives the same bits, as on a CPU."""

    @property
    def drew(self) -> bool:
        """Whether something random was computed."""

    def gradient(self, samples: Any, sizes: Sequence[int], nudge: int = 0) -> Gradient:
        """Of these samples, in micro-batches of these sizes.

        `nudge` from 1 to `EXAMPLES`: with every number moved by its last bit, and the loss stretched by
        `STRETCHES[nudge - 1]`.
        """

    def disturbed(self, samples: Any) -> AbstractContextManager[Any]:
        """Inside, samples or weights are others, nothing that was learned; gives the samples, None if it cannot."""

    def other_draws(self) -> Iterable[AbstractContextManager[Any]]:
        """Inside each of them random numbers fall otherwise."""

    def size(self, array: Any) -> float:
        """Its norm."""

    def apart(self, one: Any, other: Any) -> float:
        """The norm of the difference; infinite where shapes differ."""


class Answer(Enum):
    """Of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_AGAIN = "not again"
    """The same samples gave another gradient the second time: a state beside weights and batch is at work."""
    NOT_SHOWN = "not shown"
    """The gradient is zero, not finite, or mostly rounding."""


class Trial(NamedTuple):
    """Samples to compare on, and the sizes of the parts."""

    samples: Any
    sizes: Sequence[int]


class Refused(Exception):  # noqa: N818 - never leaves the comparison
    """What was about to be computed forbids a split, whatever its gradient is."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class PartError(Exception):
    """What a part of the samples raised, and all of them together did not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def words(self) -> str:
        """Its first line."""
        return f"a part of the batch fails: {str(self.error).partition(chr(10))[0]}"


def parts_of(samples: int) -> list[int]:
    """Unequal, and with most pairs of samples in two of them.

    >>> parts_of(6), parts_of(2)
    ([3, 1, 1, 1], [1, 1])
    """
    half = (samples + 1) // 2
    return [half, *[1] * (samples - half)]


def judge(backend: Backend, trials: Iterable[Trial]) -> Answer:
    """Of the first trial everything must be shown; a further one may show a difference, or nothing."""
    is_first = True
    for trial in trials:
        try:
            answer = compare(backend, trial)
        except (PartError, Refused):
            raise
        except Exception as error:
            if is_first or is_oom(error):
                raise
            continue  # these samples may not do for the loss: nothing is shown
        if is_first and answer is Answer.NOT_SHOWN:  # near its goal a gradient is mostly rounding
            with backend.disturbed(trial.samples) as other:
                answer = answer if other is None else compare(backend, Trial(other, trial.sizes))
        if is_first and answer is Answer.SAME and backend.drew:
            answer = _with_other_draws(backend, trial)
        if answer in (Answer.DIFFERENT, Answer.NOT_AGAIN) or (is_first and answer is not Answer.SAME):
            return answer
        is_first = False
    return Answer.SAME


def _with_other_draws(backend: Backend, trial: Trial) -> Answer:
    for draws in backend.other_draws():
        with draws:
            answer = compare(backend, trial)
        if answer in (Answer.DIFFERENT, Answer.NOT_AGAIN):
            return answer
    return Answer.SAME


def compare(backend: Backend, trial: Trial) -> Answer:
    """Whole and parts of the same samples."""
    samples, sizes = trial
    whole = backend.gradient(samples, [sum(sizes)])
    if not all(math.isfinite(backend.size(each)) for each in [*whole.arrays, *whole.beside]):
        return Answer.NOT_SHOWN
    try:
        parts = backend.gradient(samples, sizes)
    except Exception as error:
        if is_oom(error) or isinstance(error, Refused):
            raise
        raise PartError(error) from None
    is_left = are_equal(backend, whole.left, parts.left)
    if is_left and alike(backend, whole, parts):
        return Answer.SAME if any(map(backend.size, whole.arrays)) else Answer.NOT_SHOWN
    again = backend.gradient(samples, [sum(sizes)])
    if backend.is_deterministic and not alike(backend, whole, again):
        return Answer.NOT_AGAIN
    if not is_left:
        return Answer.DIFFERENT
    examples = [backend.gradient(samples, [sum(sizes)], nudge) for nudge in range(1, EXAMPLES + 1)]
    if not alike(backend, whole, again, examples):
        return Answer.NOT_AGAIN
    if not alike(backend, whole, parts, examples):
        return Answer.DIFFERENT
    is_clear = all(alike(backend, whole, each, tolerance=LARGE) for each in examples)
    return Answer.SAME if is_clear else Answer.NOT_SHOWN


def alike(
    backend: Backend,
    whole: Gradient,
    other: Gradient,
    examples: Sequence[Gradient] = (),
    tolerance: float | None = None,
) -> bool:
    """Equal but for rounding, of which the examples show how much there is."""
    tolerance = backend.tolerance if tolerance is None else tolerance
    first, second = [*whole.arrays, *whole.beside], [*other.arrays, *other.beside]
    rounded = [[*each.arrays, *each.beside] for each in examples]
    if len(first) != len(second):
        return False
    sizes = [backend.size(each) for each in first]
    norm = math.hypot(*sizes)
    for number, (one, another) in enumerate(zip(first, second, strict=True)):
        rounding = max((backend.apart(one, each[number]) for each in rounded), default=0.0)
        allowed = tolerance * (sizes[number] + 1e-3 * norm) + TIMES * rounding
        if not backend.apart(one, another) <= allowed:
            return False
    return True


def are_equal(backend: Backend, one: list[Any], other: list[Any]) -> bool:
    """To the last bit."""
    return len(one) == len(other) and not any(map(backend.apart, one, other))


Pair = tuple[float, float]
"""What a loss function gave as (sum, weight)."""
_LEAST = 1e-4  # a sum beside a large term that is no sample's (a divergence of the weights) is nearly a mean
_FAR = 0.1  # a mean and a sum of several parts are far further apart


class NoPair(BadLoss):
    """Raised although the batch fits: as it is, another loss would be trained than is meant."""


def check_pair(whole: list[Pair], parts: list[Pair], sizes: Sequence[int], tolerance: float) -> None:
    """Raise where what is returned as (sum, weight) is a mean, or a mean beside a loss.

    >>> check_pair([(6.0, 3.0)], [(2.0, 1.0), (4.0, 2.0)], [1, 2], 1e-5)
    """
    if len(whole) != 1 or len(parts) != len(sizes):
        return
    (loss, weight), losses, weights = whole[0], [one for one, _ in parts], [other for _, other in parts]
    if all(each == weight for each in weights):
        return  # a constant, by which a user may well divide
    near = max(_LEAST, tolerance)
    is_mean = any(_is_mean(loss, losses, by, near) for by in (sizes, weights))
    if is_mean or _is_mean(weight, weights, sizes, near):
        given = ", ".join(f"({one:.4g}, {other:.4g})" for one, other in parts[:3])
        raise NoPair(
            "what the loss function returns is not a sum and its weight",
            received=f"({loss:.4g}, {weight:.4g}) for {sum(sizes)} samples, and for parts of them {given}...: these do "
            "not add up",
            expected="only the loss; or (sum of the losses, how many), which is trained as their quotient",
            hint="return only the loss, and append an accuracy or a count to a list of your own",
        )


def _is_mean(value: float, parts: list[float], shares: Sequence[float], near: float) -> bool:
    total = sum(shares)
    if not total:
        return False
    mean = sum(part * share for part, share in zip(parts, shares, strict=True)) / total
    return abs(mean - value) <= near * abs(value) and _FAR * abs(value) < abs(sum(parts) - value)


class Asked:
    """Split steps by what they compute; each kind is compared at its 1st, 2nd, 4th, 8th... step.

    A later step may show what the first did not: another loss, a layer that was thawed, a batch that is padded.

    >>> asked = Asked()
    >>> [asked.is_due("plain", done=True) for _ in range(4)], asked.is_due("padded")
    ([True, True, False, True], True)
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, int] = {}

    def is_due(self, kind: Hashable, *, done: bool = False) -> bool:
        """Whether the next split step of this kind is to be compared; `done` counts it."""
        kind = self.known_as(kind)
        number = self._steps.get(kind, 0) + 1
        if done:
            self._steps[kind] = number
        return number & (number - 1) == 0

    def doubt(self, kind: Hashable) -> str:
        """To be added to a refusal: steps that compute the same were split, and perhaps it was there unseen.

        A kind is a pair of what is computed and what the batch is like.

        >>> asked = Asked()
        >>> asked.count(("mean", "plain"))
        >>> asked.doubt(("mean", "padded")) != "", asked.doubt(("sum", "padded"))
        (True, '')
        """
        similar = [other for other in self._steps if other == kind or _computes(other) == _computes(kind)]
        steps = sum(self._steps[other] for other in similar)
        if not steps:
            return ""
        return (
            f"; steps like this one that were split before it ({steps}) may have had another gradient: start over, or "
            "from the last checkpoint before them"
        )

    def count(self, kind: Hashable) -> None:
        """A step of this kind is split."""
        self.is_due(kind, done=True)

    def known_as(self, kind: Hashable) -> Hashable:
        """The kind itself; None, which stands for all others, when there are too many of them."""
        if kind in self._steps or len(self._steps) < KINDS:
            return kind
        # What is computed stays apart even then: another loss was never compared with this one.
        rest = (_computes(kind), None) if isinstance(kind, tuple) else None
        return rest if rest in self._steps or len(self._steps) < 2 * KINDS else None


def _computes(kind: Hashable) -> Hashable:
    return kind[0] if isinstance(kind, tuple) else kind


def traits(least: float, largest: float, has_zero: bool) -> tuple[bool, ...]:
    """What of an array of integers, flags or a mask makes kinds of batches differ: padding, ignored labels, one class.

    >>> traits(-100, 9, True) == traits(-1, 7, True), traits(0, 9, True) == traits(1, 9, False)
    (True, False)
    """
    return least < 0, has_zero, least == largest, largest == 255  # 255: what segmentation ignores
