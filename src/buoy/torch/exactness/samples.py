"""The few samples on which micro-batches are tried: those that would show it if they gave another gradient.

`some` is a gradient or buffer in few numbers, of which none was left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from buoy.microbatch.batch import Batch
from buoy.microbatch.exactness import FEW_VALUES, Column, Wish, column_of, extremes, labels, picked, ranges

SAMPLES = 6
FEWEST = 2
"""Where more do not fit."""
MANY = 32
"""Samples of a micro-batch that are compared with two halves of them."""
_LOOKED_AT = 1 << 20
"""Numbers of an array: of larger ones, every second, third, ... of each sample."""
_SAMPLES_LOOKED_AT = 1024
"""Where the user's own split must be asked for each of them."""


def trials_of(whole: Batch, most: int) -> list[Batch]:
    """A few samples for each trial, among them those that differ: in labels, weights, masks, padding and size.

    A mean over tokens, over what is not ignored or by class weights shows there, and a loss that seeks pairs.
    """
    n = whole.samples
    if n <= most:
        return [whole.part(0, n) if whole.gives_ranges_only else whole.picked(list(range(n)))]
    if whole.gives_ranges_only:
        return [whole.part(start, stop) for start, stop in ranges(_by_asking(whole), n, most)]
    found = [_wishes(array, n) for array in whole.arrays] + [_of_entries(each) for each in whole.entries]
    return [whole.picked(rows) for rows in picked(_in_order(found), n, most)]


def spread(whole: Batch, number: int) -> Batch:
    """So many samples, from everywhere in the batch."""
    if whole.gives_ranges_only:
        return whole.part(0, number)
    return whole.picked([row * whole.samples // number for row in range(number)])


def twice(few: Batch) -> Batch:
    """As many samples, the first half of them two times: what is divided by a count of some of them shows there."""
    half = list(range(max(1, few.samples // 2)))
    return few.picked([*half, *half])


_Found = tuple[list[list[Wish]], list[list[Wish]]]
"""Of numbers that a sample has one of, and of numbers that it has many of."""


def _wishes(array: Any, n: int) -> _Found:
    try:
        values = torch.as_tensor(array).detach()
        if not values.dim() or len(values) != n or values.is_complex() or values.layout != torch.strided:
            return [], []
        single, several = _columns(_thinned(values.reshape(n, -1)))
    except (RuntimeError, TypeError, ValueError):  # an array of strings; a dtype that has no least number
        return [], []
    return [labels(column) for column in single], [extremes(column) for column in several]


def _columns(flat: torch.Tensor) -> tuple[list[Column], list[Column]]:
    """What each sample has one of, and how much of it is what padding, masks and rare labels are made of."""
    if flat.shape[1] == 0:
        return [], []
    if flat.dtype == torch.bool:
        flat = flat.byte()
    if flat.shape[1] == 1:
        return [_column(flat[:, 0])], []
    nothing = flat.isnan().sum(1) if flat.is_floating_point() else torch.zeros(len(flat))
    single = []
    if flat.shape[1] <= FEW_VALUES:
        single = [_column(each) for each in flat.unbind(1) if _is_whole(each)]
    if not _is_whole(flat):
        marks = [0.0, *_set_apart(flat), *(-value for value in _set_apart(-flat))]
        return single, [
            *(_column((flat == value).sum(1)) for value in dict.fromkeys(marks)),
            _column(nothing),
        ]
    values, counts = flat.unique(return_counts=True)  # type: ignore[no-untyped-call]
    if len(values) == 2 and bool((flat.max(1).values == values[1]).all()):
        once = (flat == values[1]).sum(1)
        if bool((once == 1).all()):  # one of many: a label
            single.append(_column((flat == values[1]).int().argmax(1)))
    if len(values) > FEW_VALUES:
        values = torch.stack([values[0], values[-1], values[counts.argmax()]])
    several = [(flat == value).sum(1) for value in values]
    several += [_run(flat), _run(flat.flip(1))]  # padding by any number, before or behind
    return single, [*map(_column, several), _column(nothing)]


def _set_apart(flat: torch.Tensor) -> list[float]:
    """The least number, if it may stand for one that is missing: -1 or -999 among measurements, a limit of a sensor."""
    flat = flat[~flat.isnan()]
    above = flat[flat > flat.min()] if len(flat) else flat
    if not len(above):
        return []
    least, second, largest = float(flat.min()), float(above.min()), float(above.max())
    is_far = second - least > (largest - second) / 2  # among numbers like any other the next one is near
    return [least] if is_far or len(flat) - len(above) > 1 else []


def _run(flat: torch.Tensor) -> torch.Tensor:
    """How often each row begins with the same number."""
    return (flat == flat[:, :1]).int().cumprod(1).sum(1)


def _is_whole(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or bool((values == values.round()).all())


def _thinned(flat: torch.Tensor) -> torch.Tensor:
    each = max(2, _LOOKED_AT // len(flat))
    return flat if flat.shape[1] <= each else flat[:, :: -(-flat.shape[1] // each)]


def _column(values: torch.Tensor) -> Column:
    return column_of(values.tolist())


def _of_entries(entries: list[Any]) -> _Found:
    """A list with one entry per sample: its numbers, or how large its entries are (texts, boxes of an image)."""
    if all(isinstance(entry, (bool, int, float, type(None))) for entry in entries):
        return [labels(column_of(entries))], []
    return [], [extremes(list(sizes)) for sizes in zip(*map(_sizes, entries), strict=False)]


def _sizes(entry: Any) -> list[int]:
    if isinstance(entry, Mapping):
        return [size for key in sorted(entry, key=str) for size in _sizes(entry[key])]
    shape = getattr(entry, "shape", None)
    if shape is not None:
        return [math.prod(shape)]
    return [len(entry)] if isinstance(entry, (str, bytes)) else []


def _by_asking(whole: Batch) -> list[list[Wish]]:
    """Of the user's own split: each sample is taken alone and looked at, as it is not known where it is in an array."""
    n = whole.samples
    if n > _SAMPLES_LOOKED_AT:
        return []
    try:
        parts = [[*map(torch.as_tensor, whole.part(row, row + 1).arrays)] for row in range(n)]
    except Exception:  # noqa: BLE001 - the user's own function: not for one sample
        return []
    found: list[_Found] = []
    for arrays in zip(*parts, strict=False):
        found.append(([], [extremes([math.prod(array.shape) for array in arrays])]))
        if len({array.shape for array in arrays}) == 1:
            found.append(_wishes(torch.stack([array.detach().reshape(-1) for array in arrays]), n))
    return _in_order(found)


def _in_order(found: list[_Found]) -> list[list[Wish]]:
    """One number per sample is mostly a label, a weight or a mask; what comes last is mostly a target."""
    one = [wishes for single, _ in found for wishes in single]
    many = [wishes for _, several in found for wishes in several]
    return [*one[::-1], *many[::-1]]


_KEPT = 1 << 14  # numbers, at most about two times as many


def some(values: torch.Tensor | None) -> torch.Tensor:
    """A copy; of a large tensor sums of neighbours, each with a factor of its own; empty without one.

    Every number counts: in the gradient of a large embedding a few rows are all that is not zero.

    >>> rows = torch.zeros(100_000, 8)
    >>> rows[777, 3] = 1.0
    >>> bool(some(rows).any())
    True
    """
    if values is None:
        return torch.empty(0)
    values = values.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
    width = -(-flat.numel() // _KEPT)
    if width <= 1:
        return flat.clone()
    if not flat.is_floating_point():
        return flat[::width].clone()
    factors = torch.rand(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    factors[::2] *= -1  # gradients often add up to zero
    flat = flat.float() if flat.dtype == torch.float16 else flat  # whose largest number is small
    factors = factors.to(flat)
    rows = flat.numel() // width
    rest = flat[rows * width :]
    sums = flat[: rows * width].view(rows, width) @ factors
    return torch.cat([sums, rest * factors[: len(rest)]])
