"""When not even one sample fits: who owns the memory, and what would help."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from buoy.microbatch.errors import OutOfMemory
from buoy.units import format_bytes


def too_big(
    modules: Iterable[torch.nn.Module],
    parameters: list[torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
    error: BaseException,
    what: str = "one sample does",
) -> OutOfMemory:
    """The error for a step that cannot be cut any further, with what owns the peak."""
    weights = _total(parameters)
    gradients = _total(parameter for parameter in parameters if parameter.requires_grad)
    state = _total(
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    buffers = _total(buffer for module in modules for buffer in module.buffers())
    owners = {"parameters": weights, "gradients": gradients, "optimizer state": state, "buffers": buffers}
    received = ", ".join(f"{name} {format_bytes(size)}" for name, size in owners.items() if size)
    largest = max(
        ((name, _total(part.parameters(recurse=False))) for m in modules for name, part in m.named_modules()),
        key=lambda pair: pair[1],
        default=None,
    )
    if largest is not None and largest[1]:
        received += (
            f"; the largest layer is {largest[0] or 'the model itself'} with {format_bytes(largest[1])}"
        )
    if weights + gradients + state > _asked(error):
        hint = "parameters own the memory: SGD or Adafactor in place of Adam, fewer trained parameters (LoRA), or " \
               "half precision; `buoy plan` compares them"  # fmt: skip
    else:
        hint = "activations own the memory: mixed precision (torch.autocast), activation checkpointing " \
               "(torch.utils.checkpoint), shorter or smaller samples; `buoy plan` compares them"  # fmt: skip
    first = str(error).split("\n")[0]
    return _caused(OutOfMemory(f"{what} not fit: {first}", received=received,
                               expected="room for a sample's activations too", hint=hint), error)  # fmt: skip


def _caused(made: OutOfMemory, error: BaseException) -> OutOfMemory:
    made.__cause__ = error
    return made


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _asked(error: BaseException) -> int:
    """Bytes that the failed allocation wanted, where it says so."""
    import re

    found = re.search(r"[Tt]ried to allocate ([0-9.]+) ?(B|bytes|KiB|MiB|GiB)", str(error))
    if found is None:
        return 0
    return int(float(found[1]) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.get(found[2], 1))
