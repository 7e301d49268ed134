"""Which samples would show it if micro-batches gave another gradient.

A loss that counts some samples more than others (class weights, ignored labels, masks, a mean over tokens) is no mean
over samples, and only samples that differ in this show it: a rare one beside a common one. Which array decides is not
known, so each has its turn; what one trial has no room for is in the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

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
