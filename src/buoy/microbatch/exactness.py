"""Is the gradient of the micro-batches that of the whole batch? One ladder for every framework.

A few samples are computed as a whole and in parts. Equal gradients are the only proof: whatever is not shown to be
equal is refused. A framework takes part with a `Backend`; everything here works on its answers alone.

How much of a difference may be rounding is measured, by computing the whole again with every number moved by its last
bit. Moves at random do not show it where thousands of equal numbers are added one after the other, as the gradient of a
bias behind a mean over all pixels is: each addition errs to the same side. So the loss is also taken times a number,
and the gradient divided by it: that is the same, whatever is computed, but for rounding, which is another one.

Which samples would show it: a loss that counts some samples more than others (class weights, ignored labels, masks, a
mean over tokens) is no mean over samples, and only samples that differ in this show it: a rare one beside a common one.
Which array decides is not known, so each has its turn; what one trial has no room for is in the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from buoy.microbatch.errors import BadLoss, is_oom

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
        return f"a micro-batch fails: {str(self.error).partition(chr(10))[0]}"


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
    # Two scales: beside a metric in dollars, or a mask of -1e9 among the buffers, any gradient is like rounding.
    gradients = len(whole.arrays)
    scales = math.hypot(*sizes[:gradients]), math.hypot(*sizes[gradients:])
    for number, (one, another) in enumerate(zip(first, second, strict=True)):
        rounding = max((backend.apart(one, each[number]) for each in rounded), default=0.0)
        allowed = tolerance * (sizes[number] + 1e-3 * scales[number >= gradients]) + TIMES * rounding
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


# Which samples would show it.

TRIALS = 8
"""At most, with other samples each; most batches need one or two."""
FEW_VALUES = 8
"""A label that has no more of them is looked at with each."""
_CANDIDATES = 16
"""Rows looked at for one wish: the one that fulfils most others is taken."""

Column = list[float | None]
"""A number for each sample; None where it is none (NaN)."""


def column_of(values: Iterable[float | None]) -> Column:
    """These as a column: NaN is the number that is not equal to itself.

    >>> column_of([1.0, float("nan"), None])
    [1.0, None, None]
    """
    return [None if value is None or value != value else value for value in values]


class Wish(NamedTuple):
    """Samples with one of these values, beside one that has another."""

    column: Column
    values: frozenset[float | None]
    inside: int = 1

    def holds(self, row: int) -> bool:
        """Whether this sample has one of the values."""
        return self.column[row] in self.values

    def is_met(self, rows: Iterable[int]) -> bool:
        """Whether these samples would show it."""
        held = [self.holds(row) for row in rows]
        return sum(held) >= self.inside and not all(held)


def labels(column: Column) -> list[Wish]:
    """For one number per sample: the rare, the least (ignored ones are negative), the largest, two that are equal.

    >>> [sorted(wish.values) for wish in labels([0, 0, 0, 1, 2, 2])]
    [[1], [0], [2], [0]]
    """
    counts = Counter(column)
    known = [value for value in counts if value is not None]
    if len(counts) < 2 or not known:
        return []
    least, largest = frozenset([min(known)]), frozenset([max(known)])
    chosen: list[tuple[frozenset[float | None], int]] = [(frozenset([None]), 1)] if None in counts else []
    if not all(float(value).is_integer() for value in known):
        chosen += [(largest, 1), (least, 1), (frozenset([0.0]), 1)]
    else:
        by_count = sorted(counts, key=lambda value: counts[value])
        fewest = counts[by_count[0]]
        chosen += [
            (frozenset(value for value in counts if counts[value] == fewest), 1),
            (least, 1),
            (largest, 1),
        ]
        chosen += [(frozenset(by_count[-1:]), 2)]
        if len(counts) <= FEW_VALUES:
            chosen += [(frozenset([value]), 1) for value in by_count]
    return [
        Wish(column, values, inside)
        for values, inside in dict.fromkeys(chosen)
        if inside <= sum(counts[value] for value in values) < len(column)
    ]


def extremes(column: Column) -> list[Wish]:
    """For how much of a sample is padding, or how large it is: the most and the least.

    >>> [sorted(wish.values) for wish in extremes([3, 5, 4])]
    [[5], [3]]
    """
    known = [value for value in column if value is not None]
    if len(set(column)) < 2 or not known:
        return []
    most, least = frozenset([max(known)]), frozenset([min(known)])
    # Two of the most: words that happen to be alike look like padding.
    second = [Wish(column, most, 2)] if 2 <= column.count(max(known)) < len(column) else []
    return [Wish(column, most), Wish(column, least), *second]


def picked(wishes: list[list[Wish]], samples: int, most: int) -> list[list[int]]:
    """For each trial the numbers of its samples, as many as it may have, in their order in the batch.

    The wishes of each array come with the most telling first; arrays that matter more come first.
    """
    wanted, trials = _by_turns(wishes), list[list[int]]()
    while not trials or (wanted and len(trials) < TRIALS):
        rows = _fulfilling(wanted, most)
        spread = [number * samples // most for number in range(most)]
        rows = list(dict.fromkeys([*rows, *spread, *range(min(samples, 2 * most))]))[:most]
        # A batch that is sorted by length stays so: some models ask for it.
        trials.append(sorted(rows))
        wanted = [wish for wish in wanted if not wish.is_met(rows)]
    return trials


def ranges(wishes: list[list[Wish]], samples: int, most: int) -> list[tuple[int, int]]:
    """The same where only neighbours can be had together: where one sample has the value and the next has not.

    >>> ranges([extremes([9] * 20 + [8] * 4)], 24, 6)
    [(0, 6), (15, 21), (9, 15), (18, 24)]
    """
    last = max(0, samples - most)
    starts, wanted = [0], _by_turns(wishes)

    def unmet(start: int) -> list[Wish]:
        return [wish for wish in wanted if not wish.is_met(range(start, min(samples, start + most)))]

    wanted = unmet(0)
    while wanted and len(starts) < TRIALS:
        edges = _edges(wanted.pop(0), samples)  # if it needs more than lie together, it stays unmet
        around = {start for edge in edges for start in range(edge - most + 2, edge + 1) if 0 <= start <= last}
        starts.append(min(around, key=lambda start: (len(unmet(start)), start)))
        wanted = unmet(starts[-1])
    starts = list(dict.fromkeys([*starts, last // 2, last]))[:TRIALS]
    return [(start, min(samples, start + most)) for start in starts]


def _edges(wish: Wish, samples: int) -> list[int]:
    """Where a sample has one of the values and the next one has not, or the other way round; there is such a place."""
    held = [wish.holds(row) for row in range(samples)]
    return [row for row in range(samples - 1) if held[row] != held[row + 1]][:_CANDIDATES]


def _by_turns(wishes: list[list[Wish]]) -> list[Wish]:
    return [wish for turn in zip_longest(*wishes) for wish in turn if wish is not None]


def _fulfilling(wanted: list[Wish], most: int) -> list[int]:
    rows: list[int] = []
    for wish in wanted:
        if len(rows) >= most:
            break
        more = _missing(wish, rows, wanted)
        if more is not None and len(rows) + len(more) <= most:
            rows += more
    return rows


def _missing(wish: Wish, rows: list[int], wanted: list[Wish]) -> list[int] | None:
    """The samples that are needed beside these; None where the batch has none."""
    more: list[int] = []
    held = [wish.holds(row) for row in rows]
    for inside in [True] * (wish.inside - sum(held)) + [False] * (all(held)):
        candidates = [row for row in _rows(wish, inside) if row not in rows and row not in more]
        if not candidates:
            return None
        open_wishes = [other for other in wanted if not any(other.holds(row) for row in [*rows, *more])]
        more.append(max(candidates, key=lambda row: sum(other.holds(row) for other in open_wishes)))
    return more


def _rows(wish: Wish, inside: bool) -> list[int]:
    found: list[int] = []
    for row, value in enumerate(wish.column):
        if (value in wish.values) is inside:
            found.append(row)
            if len(found) == _CANDIDATES:
                break
    return found
