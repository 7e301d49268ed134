"""A loss that counts only some samples, by what it computes: the hardest, those that miss a margin.

Which ones is not in the batch, so it must be computed: a sample that does not count has no loss when it is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.constant import Generators
from buoy.torch.few import SAMPLES
from buoy.torch.quiet import Still, eager, same_random
from buoy.torch.unmoved import Unmoved

LOOKED_AT = 24
"""Samples that are computed alone."""


def rows_without_loss(
    whole: Batch,
    loss_fn: LossFunction,
    modules: list[torch.nn.Module],
    attempt: Callable[[Callable[[], Any]], Any],
    most: int = LOOKED_AT,
) -> list[int] | None:
    """Some samples that have no loss alone, beside others that have one; None where there are no two kinds.

    `most` samples are looked at. `attempt` runs a function and puts everything back after it.
    """
    n = whole.samples
    if n <= SAMPLES or whole.gives_ranges_only:
        return None
    rows = sorted({number * n // most for number in range(most)})

    def work() -> list[float]:
        unmoved, still = Unmoved(modules), Still()
        still.ahead = unmoved.see
        alone = same_random(loss_fn, Generators())
        try:
            with torch.no_grad(), still, unmoved, eager():
                return [_number(alone(whole.take(row, row + 1))) for row in rows]
        finally:
            unmoved.put_back()

    try:
        losses = attempt(work)
    except Exception:  # noqa: BLE001 - one sample alone may not do for this loss; the comparison has spoken
        return None
    without = [row for row, loss in zip(rows, losses, strict=True) if not loss or loss != loss]
    others = [row for row in rows if row not in without]
    if not without or not others:
        return None
    half = SAMPLES // 2
    return sorted([*without[:half], *others[: SAMPLES - min(half, len(without))]])


def _number(made: Any) -> float:
    return float(made[0] if isinstance(made, tuple) else made)
