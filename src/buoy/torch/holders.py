"""What holds memory in this process now: tensors by owner, arrays, data frames, outputs, an old traceback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from buoy.machine import heap


def holders(modules: Iterable[nn.Module] = (), optimizers: Iterable[torch.optim.Optimizer] = ()) -> heap.Held:
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
    kinds: dict[str, heap.Size] = {
        "tensor": _tensor,
        "NumPy array": heap.array,
        "data frame": heap.data_frame,
    }
    return heap.by_owner(owners, _tensor, kinds)


def _tensor(thing: Any) -> tuple[int, int] | None:
    if not isinstance(thing, torch.Tensor):
        return None
    storage = thing.untyped_storage()
    return storage.data_ptr(), int(storage.nbytes())
