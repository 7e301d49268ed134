"""Batches of other people's loops: one that has no samples in the plain sense is never cut, and goes through whole."""

from __future__ import annotations

from buoy.microbatch.batch import Batch, Split
from buoy.microbatch.errors import StepError


def samples_of(batch: object) -> int:
    """How many samples it has; 1 when it cannot be cut.

    >>> import torch
    >>> samples_of({"boxes": torch.zeros(5, 4), "image": torch.zeros(3, 8, 8)})
    1
    """
    try:
        return Batch(batch).samples
    except StepError:
        return 1


def split_of(batch: object) -> Split | None:
    """How to cut it; None: along the first dimension of its arrays."""
    try:
        Batch(batch)
    except StepError:
        return 1, lambda start, stop: batch
    return None


def hint_in_a_trainer(hint: str, fewer: str) -> str:
    """What can be done there, where a hint is about arguments of `run.backward`; `fewer`: how to ask for less at once.

    >>> hint_in_a_trainer('reduction="sum"', "a smaller batch")
    'a smaller batch; in a loop of your own, `run.backward` of buoy.Run takes a loss as (sum, how many), and `split=`'
    """
    if not any(word in hint for word in ("split=", "reduction=", "(sum", "run.backward")):
        return hint
    return f"{fewer}; in a loop of your own, `run.backward` of buoy.Run takes a loss as (sum, how many), and `split=`"
