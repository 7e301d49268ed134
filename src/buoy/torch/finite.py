"""Whether a training has left the finite numbers: asked at a save only, so that no step waits for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_SAMPLED = 8
_LARGEST = 1 << 16


def is_finite(loss: Any) -> bool | None:
    """Whether a loss is a number that is not infinite; None when it is no number at all.

    >>> is_finite(torch.tensor(0.5)), is_finite(torch.tensor(float("nan"))), is_finite(None)
    (True, False, None)
    """
    if isinstance(loss, torch.Tensor):
        return bool(torch.isfinite(loss.detach()).all()) if loss.numel() else None
    return None


def weights_are_lost(objects: Iterable[object]) -> bool:
    """Whether a weight is NaN, of the few smallest: a loss that is NaN makes all of them so within one step."""
    trained = [weight for each in objects if isinstance(each, nn.Module) for weight in each.parameters()]
    small = [
        weight.detach()
        for weight in trained
        if _is_plain(weight) and weight.requires_grad and 0 < weight.numel() <= _LARGEST
    ]
    small = sorted(small, key=torch.Tensor.numel)[:_SAMPLED]
    return any(bool(torch.isnan(weight).any()) for weight in small)


def _is_plain(weight: nn.Parameter) -> bool:
    """Not sharded, whose question would go to all ranks, nor without values of its own."""
    return type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta
