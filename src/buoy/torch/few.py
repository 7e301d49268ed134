"""The few samples on which micro-batches are tried: those that would show it if they gave another gradient."""

from __future__ import annotations

from typing import Any

import torch

from buoy.microbatch.split import Batch

SAMPLES = 6
FEWEST = 2
"""Where more do not fit."""


def few_of(whole: Batch, most: int) -> Batch:
    """Some samples, among them those that differ: the most and the least padded, rare and equal labels.

    A mean over tokens, over what is not ignored or by class weights shows there, and a loss that seeks pairs.
    """
    n = whole.samples
    if whole.gives_ranges_only:  # a person's own cut gives ranges only
        return whole.part(0, min(n, most))
    chosen: list[int] = []
    for array in whole.arrays if n > most else []:
        try:
            chosen += _chosen(array, n)
        except RuntimeError:  # a dtype that has no least number
            continue
    spread = [number * n // most for number in range(most)]
    indices = list(dict.fromkeys([*chosen[: most - 1], *spread, *range(n)]))[:most]
    return Batch(whole.pick(indices))


def _chosen(array: Any, n: int) -> list[int]:
    if not isinstance(array, torch.Tensor) or not array.dim():
        return []
    flat = array.detach().reshape(n, -1)
    if _is_counted(array):
        if array.dim() < 2:
            return _telling(flat.reshape(n))
        padded = (flat == flat.min()).sum(dim=1)
        return [int(padded.argmin()), int(padded.argmax())]
    if array.is_complex() or array.numel() != n:
        return []
    return [int(flat.argmax()), int(flat.argmin())]  # a target, or a weight


def _is_counted(array: torch.Tensor) -> bool:
    return not array.is_floating_point() and not array.is_complex()


def twice(few: Batch) -> Batch:
    """As many samples, the first half of them two times: what is divided by a count of some of them shows there."""
    half = list(range(max(1, few.samples // 2)))
    return Batch(few.pick([*half, *half]))


def _telling(labels: torch.Tensor) -> list[int]:
    """A sample of the rarest label, of the least (ignored ones are negative), and two that share theirs."""
    kind, count = labels.unique(return_inverse=True, return_counts=True)[1:]  # type: ignore[no-untyped-call]
    equal = (kind == count.argmax()).nonzero().reshape(-1)[:2].tolist()
    return list(dict.fromkeys([int((kind == count.argmin()).int().argmax()), int(labels.argmin()), *equal]))
