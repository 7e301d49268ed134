"""What holds memory in this process now: tensors by owner, arrays, data frames, outputs, an old traceback.

When not even one sample fits: who owns the memory, and which remedies act on that.

Whether a training has left the finite numbers: asked at a save only, so that no step waits for the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from buoy.machine import variables
from buoy.microbatch.errors import OutOfMemory
from buoy.torch.memory.device import HostMemory, memory_of
from buoy.torch.step.optimizer import expected_state
from buoy.units import format_bytes


def holders(
    modules: Iterable[nn.Module] = (), optimizers: Iterable[torch.optim.Optimizer] = ()
) -> variables.Held:
    """Bytes by owner, largest first. Each storage is counted once, for the first owner that fits.

    >>> import torch
    >>> held = holders([torch.nn.Linear(1000, 1000)])
    >>> held.sizes["parameters"]
    4004000
    """
    modules, optimizers = list(modules), list(optimizers)
    owners: dict[str, Iterable[Any]] = {
        "parameters": (p for module in modules for p in module.parameters()),
        "gradients": (p.grad for module in modules for p in module.parameters()),
        "buffers": (b for module in modules for b in module.buffers()),
        "optimizer state": (v for o in optimizers for state in o.state.values() for v in state.values()),
    }
    return variables.by_owner(owners)


_COMPARE = "`buoy plan` says what each would save"
_SWITCHES = ("amp", "checkpointing")


def too_big(
    modules: Iterable[torch.nn.Module],
    parameters: list[torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
    error: BaseException,
    what: str = "one sample does",
    applied: tuple[str, ...] = (),
) -> OutOfMemory:
    """The error for a step that cannot be split any further; what the failed tries held is free again."""
    modules = list(modules)
    every = {id(p): p for p in [*parameters, *(p for module in modules for p in module.parameters())]}
    weights = _total(every.values())
    made = _total(p.grad for p in every.values() if p.grad is not None)
    gradients = max(made, _total(parameters))
    has_state = [optimizer for optimizer in optimizers if optimizer.state]
    state = _total(value for optimizer in has_state for values in optimizer.state.values() for value in values.values()
                   if isinstance(value, torch.Tensor))  # fmt: skip
    to_come = sum(expected_state(optimizer) for optimizer in optimizers if not optimizer.state)
    buffers = _total(buffer for module in modules for buffer in module.buffers())

    memory = memory_of(parameters[0])
    free = memory.free()
    left = None if free is None else max(0, free - (gradients - made) - to_come)
    used = memory.used() if not isinstance(memory, HostMemory) else None  # the host's has the libraries in it
    others = 0 if used is None else max(0, used - weights - made - state - buffers)
    own = weights + gradients + state + to_come + buffers
    sizes = {"parameters": weights, "gradients": gradients, "optimizer state": state + to_come, "buffers": buffers,
             "the batch and other tensors": others}  # fmt: skip
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    if left is not None:
        words += f"; {format_bytes(left)} left for activations"
    largest = max(((_total(part.parameters(recurse=False)), name) for m in modules for name, part in m.named_modules()),
                  default=(0, ""))  # fmt: skip
    if largest[0]:
        words += f"; the largest layer is {largest[1] or 'the model itself'} with {format_bytes(largest[0])}"
    result = OutOfMemory(
        f"{what} not fit: {_first_sentence(error)}",
        received=words,
        expected="room for the activations of one sample",
        hint=_hint(
            own, others, None if left is None else max(left, _asked(error)), state + to_come > 0, applied
        ),
    )
    result.__cause__ = error
    return result


def _hint(own: int, others: int, needed: int | None, has_state: bool, applied: tuple[str, ...]) -> str:
    """One sample's activations take more than `needed`: what is larger than that, and largest, is to be lowered."""
    switches = [name for name in _SWITCHES if name not in applied]
    remedies = ["a chunked loss", "shorter or smaller samples"]
    if switches:
        listed = ", ".join(f'"{name}"' for name in switches)
        remedies.insert(0, f"remedies=({listed}{',' if len(switches) == 1 else ''}) in buoy.Run or the guard")
    if needed is None:
        return f"{', '.join(remedies)}; {_COMPARE}"
    if others > max(own, needed):
        return (
            "tensors outside this training fill the memory, such as results kept in a list or another model: "
            "`buoy.torch.memory.holders.holders()` lists them"
        )
    if own <= needed:
        return f"activations fill the memory: {', '.join(remedies)}; {_COMPARE}"
    smaller = ["SGD or Adafactor as the optimizer"] if has_state else []
    smaller += ["the optimizer's step inside backward", "LoRA", "a smaller model"]
    what = "parameters, gradients and the optimizer's state" if has_state else "parameters and gradients"
    return f"{what} fill the memory: {', '.join(smaller)}; {_COMPARE}"


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _asked(error: BaseException) -> int:
    """Bytes that the failed allocation wanted, where it says so."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) ?(B|bytes|KiB|MiB|GiB)", str(error))
    if found is None:
        return 0
    return int(float(found[1]) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.get(found[2], 1))


def _first_sentence(error: BaseException) -> str:
    """What was asked for and in vain; CUDA's goes on with advice for another case."""
    line = str(error).split("\n")[0]
    return line.partition(" GPU ")[0].rstrip()


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
