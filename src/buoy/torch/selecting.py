"""A loss that counts only some samples, by what it computes: the hardest, those that miss a margin.

Which ones is not in the batch, so it must be computed: a sample that does not count has no loss when it is alone, or
more of them have another loss together than each alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from buoy.microbatch.oom import is_oom
from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.constant import Generators
from buoy.torch.few import SAMPLES
from buoy.torch.quiet import Still, eager, same_random
from buoy.torch.release import release
from buoy.torch.unmoved import Unmoved

LOOKED_AT = 24
"""Samples that are computed alone."""
_TOGETHER = 2 * SAMPLES
"""Of these, at most: without gradients about as large as the comparison that was made before."""


class Telling(NamedTuple):
    """Samples by which it would show."""

    rows: list[int]
    alone: bool
    """Each of them is to be a part."""


def telling_rows(
    whole: Batch,
    loss_fn: LossFunction,
    reduction: str,
    modules: list[torch.nn.Module],
    attempt: Callable[[Callable[[], Any]], Any],
    most: int = LOOKED_AT,
) -> Telling | None:
    """Some samples that have no loss alone, beside others that have one; or those whose losses do not add up.

    `most` samples are looked at; together only if they are more than a comparison has. `attempt` runs a function and
    puts everything back after it.
    """
    n = whole.samples
    if n <= SAMPLES or whole.gives_ranges_only:
        return None
    rows = sorted({number * n // most for number in range(most)})
    still = Still()

    def taken(part: list[int]) -> object:
        return whole.take(part[0], part[0] + 1) if len(part) == 1 else whole.pick(part)

    def losses_of(parts: list[list[int]]) -> list[_Loss] | None:
        def work() -> list[_Loss]:
            unmoved = Unmoved(modules)
            still.ahead = unmoved.see
            same = same_random(loss_fn, Generators())
            try:
                with torch.no_grad(), still, unmoved, eager():
                    return [_read(same(taken(part))) for part in parts]
            finally:
                unmoved.put_back()

        try:
            return attempt(work)  # type: ignore[no-any-return]
        except Exception as caught:  # noqa: BLE001 - they may not do for this loss; the comparison has spoken
            error = caught
        if is_oom(error):
            release(error)
        return None

    losses = losses_of([[row] for row in rows])
    if losses is None:
        return None
    without = [row for row, (loss, _) in zip(rows, losses, strict=True) if not loss or loss != loss]
    others = [row for row in rows if row not in without]
    if without and others:
        half = SAMPLES // 2
        return Telling(sorted([*without[:half], *others[: SAMPLES - min(half, len(without))]]), alone=False)
    each = -(-len(rows) // _TOGETHER)
    rows, losses = rows[::each], losses[::each]
    together = losses_of([rows]) if others and most > SAMPLES else None
    if together is None or _adds_up(losses, together[0], reduction, still.tolerance):
        return None
    return Telling(rows, alone=True)


_Loss = tuple[float, float | None]
"""And its weight, where there is one."""


def _read(made: Any) -> _Loss:
    return (float(made[0]), float(made[1])) if isinstance(made, tuple) else (float(made), None)


def _adds_up(alone: list[_Loss], together: _Loss, reduction: str, tolerance: float) -> bool:
    """Whether this is the loss of those together; where not, gradients are to be compared."""
    loss, weight = together
    shares = len(alone) if reduction == "mean" else 1.0
    if weight is not None:
        shares, loss = sum(each or 0.0 for _, each in alone), loss / weight if weight else loss
    total, size = sum(each for each, _ in alone), sum(abs(each) for each, _ in alone)
    return not shares or abs(total / shares - loss) <= tolerance * size / shares
