"""One try at a batch's gradient: forward and backward over its parts, weighted so that they add up to the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from buoy.microbatch.errors import BadLoss, CannotSplit

LossFunction = Callable[[Any], Any]


class Progress:
    """What happens around the parts of one try; each method may be replaced."""

    def forward_done(self, loss: torch.Tensor) -> None:
        """A part's loss is there, its backward pass comes next."""

    def last_backward(self, loss: torch.Tensor) -> None:
        """The next backward pass is the last; may raise to stop it."""

    def backward_done(self, size: int) -> None:
        """A part of so many samples is done."""


def accumulate(
    samples: int,
    next_size: Callable[[int], int],
    take: Callable[[int, int], object],
    loss_fn: LossFunction,
    *,
    reduction: str,
    scaler: Any,
    parameters: list[torch.Tensor],
    progress: Progress,
) -> torch.Tensor:
    """The gradient of the whole batch, left in `.grad`; returns the loss of the whole batch, detached.

    `next_size(left)` says how many of the samples that are left come next.
    """
    __tracebackhide__ = True
    start, running, weights, divisor = 0, None, None, None
    while start < samples:
        size = next_size(samples - start)
        is_first, is_last = start == 0, start + size == samples
        _forget_cached_weights()
        loss, weight = read_loss(loss_fn(take(start, start + size)), reduction)
        _check(loss, scaler, parameters if is_first else [], size if size < samples else None)
        if weight is not None:
            if not (is_first and is_last):
                weight = _exact(weight)
            weights = weight if weights is None else weights + weight
            if is_last:
                _check_weight(weights)
                # Only now is the weight of the whole known: mend the parts before, then add this one.
                if divisor is not None:
                    _scale([p.grad for p in parameters if p.grad is not None], divisor / weights)
                share = loss / weights
            else:
                if divisor is None:
                    divisor = _at_least_one(weight * (samples / size))
                share = loss / divisor
            value = loss.detach()
        else:
            whole = is_first and is_last
            share = loss if whole or reduction == "sum" else loss * (size / samples)
            value = share.detach()
        running = value if running is None else running + value
        progress.forward_done(share)
        if is_last:
            progress.last_backward(share)
        (share if scaler is None else scaler.scale(share)).backward()
        loss = share = value = None  # type: ignore[assignment] # the graph goes before the next part comes
        progress.backward_done(size)
        start += size
    assert running is not None
    return running if weights is None else (running / weights).to(running.dtype)


def _forget_cached_weights() -> None:
    """Inside `parametrize.cached()` each part computes them again: their graph goes with a backward pass."""
    if getattr(parametrize, "_cache_enabled", 0):
        parametrize._cache.clear()


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
            if weight.requires_grad:
                raise BadLoss("the weight of the loss depends on what is trained",
                              received="(sum, weight) with a weight that requires a gradient",
                              expected="a number that the batch alone decides",
                              hint="`weight.detach()` if it is to count as a constant; otherwise return the quotient, "
                                   "which is computed whole as long as it fits")  # fmt: skip
            weight = weight.detach().reshape(())
        elif not isinstance(weight, (int, float)):
            raise _bad("the weight of the loss is not a number", weight)
        if _is_read(weight) and weight < 0:
            raise _no_weight("the weight of the loss is negative", weight)
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
    return made if made.dim() == 0 else made.reshape(()), weight


def _check(loss: torch.Tensor, scaler: Any, fresh: list[torch.Tensor], part: int | None) -> None:
    """`part`: its samples, where it is not the whole batch."""
    # Reading a number from an accelerator would stop its queue at every step.
    if scaler is None and loss.is_cpu and math.isnan(loss.item()):
        if part is not None:
            raise CannotSplit("the loss of a part of this batch is not a number (NaN)",
                              received=f"{loss.detach()} for {part} samples of it",
                              expected="a finite loss for every part",
                              hint="where all labels of a part are ignored, their mean is 0 / 0: return (sum of the "
                                   "losses, how many); a `.std()` or `.var()` over samples has no value for one: "
                                   "normalise before run.backward(...); the step was not done, weights are as before "
                                   "it")  # fmt: skip
        raise BadLoss("the loss is not a number (NaN)", received=str(loss.detach()), expected="a finite loss",
                      hint="the step was not done, weights are as before it; look at this batch, lower the learning "
                           "rate, or catch buoy.BuoyError to go on with the next batch")  # fmt: skip
    if any(parameter.grad is not None for parameter in fresh):
        raise BadLoss("the loss function computed gradients itself", received="a call of .backward() in it",
                      expected="only the loss", hint="return the loss; buoy calls backward")  # fmt: skip


def _check_weight(weight: Any) -> None:
    """Of the whole batch; a part of it may well have none."""
    if _is_read(weight) and not weight > 0:
        raise _no_weight("the loss of this batch has no weight", weight)


def _is_read(weight: Any) -> bool:
    return not isinstance(weight, torch.Tensor) or weight.device.type == "cpu"


def _no_weight(what: str, weight: Any) -> BadLoss:
    return BadLoss(what, received=f"(sum, weight) with a weight of {float(weight):g}",
                   expected="a number above 0: of tokens, or of samples that are not ignored",
                   hint="the step was not done; leave out batches in which everything is ignored")  # fmt: skip


_ONLY_THE_LOSS = "return only the loss, as one number; of a model's output its `.loss`"


def _bad(what: str, made: object, hint: str = _ONLY_THE_LOSS) -> BadLoss:
    if isinstance(made, torch.Tensor):
        received = f"a tensor of shape {list(made.shape)}, {made.dtype}"
    else:
        received = f"{type(made).__name__}: {made!r}"[:200]
    return BadLoss(what, received=received, expected="a scalar tensor, or (sum, weight)", hint=hint)


def _exact(weight: Any) -> Any:
    """Counts of tokens in double precision, where the device has it."""
    if isinstance(weight, torch.Tensor):
        return weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)
    return float(weight)


def _at_least_one(weight: Any) -> Any:
    return weight.clamp(min=1) if isinstance(weight, torch.Tensor) else max(1.0, weight)


def _scale(gradients: list[torch.Tensor], factor: Any) -> None:
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)
