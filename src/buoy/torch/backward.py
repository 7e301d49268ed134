"""One try at a batch's gradient: forward and backward over its parts, weighted so that they add up to the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from buoy.microbatch.errors import BadLoss

LossFunction = Callable[[Any], Any]


def accumulate(
    parts: list[int],
    take: Callable[[int, int], object],
    loss_fn: LossFunction,
    *,
    reduction: str,
    scaler: Any,
    parameters: list[torch.Tensor],
    forward_done: Callable[[], None],
    backward_done: Callable[[int], None],
    before_last_backward: Callable[[], None] | None = None,
    last: Callable[[bool], AbstractContextManager[object]] | None = None,
) -> torch.Tensor:
    """The gradient of the whole batch, left in `.grad`; returns the loss of the whole batch, detached.

    `last(is_last)` is entered around each part: DDP exchanges gradients in the last one only.
    """
    total = sum(parts)
    start, running, weights, divisor = 0, None, None, None
    for number, size in enumerate(parts):
        is_last = number == len(parts) - 1
        with last(is_last) if last is not None else _NOTHING:
            loss, weight = read_loss(loss_fn(take(start, start + size)), reduction)
            _check(loss, scaler, parameters if number == 0 else [])
            if weight is not None:
                weights = weight if weights is None else weights + weight
                if len(parts) == 1:
                    share = loss / weight
                elif is_last:
                    # Only now is the weight of the whole known: mend the parts before, then add this one.
                    _scale([p.grad for p in parameters if p.grad is not None], divisor / weights)
                    share = loss / weights
                else:
                    if divisor is None:
                        divisor = _at_least_one(weight * (total / size))
                    share = loss / divisor
                value = loss.detach()
            else:
                factor = size / total if reduction == "mean" and len(parts) > 1 else None
                share = loss if factor is None else loss * factor
                value = share.detach()
            running = value if running is None else running + value
            forward_done()
            if is_last and before_last_backward is not None:
                before_last_backward()
            (share if scaler is None else scaler.scale(share)).backward()
            loss = share = value = None  # type: ignore[assignment]
            backward_done(size)
        start += size
    assert running is not None
    return running if weights is None else running / weights


def read_loss(made: Any, reduction: str) -> tuple[torch.Tensor, Any]:
    """The loss, and its weight where the loss function gave (sum, weight)."""
    weight = None
    if isinstance(made, tuple):
        if len(made) != 2:
            raise _bad("the loss function gave a tuple", made)
        made, weight = made
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise _bad("the weight of the loss is not one number", weight)
            weight = weight.detach().reshape(())
        elif not isinstance(weight, (int, float)):
            raise _bad("the weight of the loss is not a number", weight)
    if not isinstance(made, torch.Tensor):
        raise _bad("the loss is not a tensor", made)
    if made.numel() != 1:
        raise _bad("the loss is not one number", made, '`.mean()` (or `.sum()` with reduction="sum")')
    if not made.requires_grad:
        raise _bad("the loss does not depend on any parameter", made,
                   "no `.detach()`, `.item()` or `torch.no_grad()` between the model and the loss")  # fmt: skip
    if reduction not in ("mean", "sum"):
        raise BadLoss("unknown reduction", received=repr(reduction), expected='"mean" or "sum"',
                      hint="for a mean over tokens return (sum of the losses, number of tokens)")  # fmt: skip
    return made.reshape(()), weight


def _check(loss: torch.Tensor, scaler: Any, fresh: list[torch.Tensor]) -> None:
    # Reading a number from an accelerator would stop its queue at every step.
    if scaler is None and loss.device.type == "cpu" and math.isnan(loss.item()):
        raise BadLoss("the loss is not a number (NaN)", received=str(loss.detach()), expected="a finite loss",
                      hint="the step was not done, weights are as before it; look at this batch, lower the learning "
                           "rate, or catch buoy.BuoyError to go on with the next batch")  # fmt: skip
    if any(parameter.grad is not None for parameter in fresh):
        raise BadLoss("the loss function computed gradients itself", received="a call of .backward() in it",
                      expected="only the loss", hint="return the loss; buoy calls backward")  # fmt: skip


def _bad(what: str, made: object, hint: str | None = None) -> BadLoss:
    if isinstance(made, torch.Tensor):
        received = f"a tensor of shape {list(made.shape)}, {made.dtype}"
    else:
        received = f"{type(made).__name__}: {made!r}"[:200]
    return BadLoss(what, received=received, expected="a scalar tensor, or (sum, weight)", hint=hint)


def _at_least_one(weight: Any) -> Any:
    return weight.clamp(min=1) if isinstance(weight, torch.Tensor) else max(1.0, weight)


def _scale(gradients: list[torch.Tensor], factor: Any) -> None:
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *details: object) -> None: ...


_NOTHING = _Nothing()
