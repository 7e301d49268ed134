"""A gradient scaler whose own small allocations may fail: what has changed nothing yet is simply done again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from buoy.flight.last_words import leave_out_ours
from buoy.microbatch.oom import is_oom
from buoy.torch.optimizer_step import Guard
from buoy.torch.release import release

_TRIES = 3


def make_scaler_safe(scaler: Any, optimizers: list[Optimizer], guard: Guard) -> None:
    """Replace the methods of this scaler that allocate; a second time changes nothing.

    `step` needs no more: what it calls of ours is safe by itself, and it changes nothing before.
    """
    for name in ("unscale_", "step", "update"):
        plain = getattr(scaler, name, None)
        if plain is not None and not hasattr(plain, "is_safe"):
            setattr(scaler, name, _repeated(scaler, plain, optimizers, guard))


def _repeated(
    scaler: Any, plain: Callable[..., Any], optimizers: list[Optimizer], guard: Guard
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def safe(*args: Any, **kwargs: Any) -> Any:
        for number in range(_TRIES):
            before = _versions(scaler, optimizers)
            stages = {key: dict(state) for key, state in scaler._per_optimizer_states.items()}
            error: BaseException
            try:
                return plain(*args, **kwargs)
            except Exception as caught:
                if not is_oom(caught) or before != _versions(scaler, optimizers) or number == _TRIES - 1:
                    leave_out_ours(caught)
                    raise
                error = caught
            release(error)
            # In place: `step` holds on to its own.
            for key, state in list(scaler._per_optimizer_states.items()):
                if key in stages:
                    state.clear()
                    state.update(stages[key])
                else:
                    del scaler._per_optimizer_states[key]
            guard.recovered("gradient scaler")
        raise AssertionError  # the last try returns or raises

    safe.is_safe = True  # type: ignore[attr-defined]
    return safe


def _versions(scaler: Any, optimizers: list[Optimizer]) -> list[int]:
    """Whether anything was changed: the scale, the gradients, the weights."""
    tensors: list[torch.Tensor | None] = [
        getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    ]  # fmt: skip
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [parameter, parameter.grad]
    return [tensor._version for tensor in tensors if tensor is not None]
