"""What holds memory in this process now: tensors by owner, arrays, data frames, outputs, an old traceback."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from buoy.units import format_bytes


def holders(
    modules: Iterable[nn.Module] = (), optimizers: Iterable[torch.optim.Optimizer] = ()
) -> dict[str, int]:
    """Bytes by owner, largest first. Each storage is counted once, for the first owner that fits.

    >>> import torch
    >>> held = holders([torch.nn.Linear(1000, 1000)])
    >>> held["parameters"]
    4004000
    """
    seen: set[int] = set()
    found: dict[str, int] = {}

    def add(owner: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            size = _bytes_once(tensor, seen)
            if size:
                found[owner] = found.get(owner, 0) + size

    modules, optimizers = list(modules), list(optimizers)
    add("parameters", (p for module in modules for p in module.parameters()))
    add("gradients", (p.grad for module in modules for p in module.parameters()))
    add("buffers", (b for module in modules for b in module.buffers()))
    add("optimizer state", (v for o in optimizers for state in o.state.values() for v in state.values()))
    add("sys.last_traceback", _in_frames(getattr(sys, "last_traceback", None)))
    add("notebook Out[]", _outputs())
    everything = gc.get_objects()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asking a deprecated object for its class is enough to be warned
        add("other tensors", (thing for thing in everything if _is_tensor(thing)))
        add("NumPy arrays", (thing for thing in everything if type(thing).__name__ == "ndarray"))
        add("data frames", (thing for thing in everything if type(thing).__name__ == "DataFrame"))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def as_text(held: dict[str, int]) -> str:
    """One line per owner."""
    return (
        "\n".join(f"{format_bytes(size):>10}  {owner}" for owner, size in held.items())
        or "nothing to speak of"
    )


def _bytes_once(thing: Any, seen: set[int]) -> int:
    try:
        if _is_tensor(thing):
            storage = thing.untyped_storage()
            key, size = storage.data_ptr(), int(storage.nbytes())
        elif type(thing).__name__ == "ndarray" and hasattr(thing, "nbytes"):
            if thing.base is not None:
                return 0
            key, size = thing.ctypes.data, int(thing.nbytes)
        elif type(thing).__name__ == "DataFrame":
            key, size = id(thing), int(thing.memory_usage(deep=False).sum())
        else:
            return 0
    except Exception:  # noqa: BLE001 - odd objects (fake, sparse, half-built) are of no interest here
        return 0
    if key == 0 or key in seen:
        return 0
    seen.add(key)
    return int(size)


def _is_tensor(thing: object) -> bool:
    try:
        return isinstance(thing, torch.Tensor)
    except Exception:  # noqa: BLE001 - a proxy whose class cannot be asked
        return False


def _in_frames(traceback: Any) -> list[Any]:
    values: list[Any] = []
    while traceback is not None:
        values += traceback.tb_frame.f_locals.values()
        traceback = traceback.tb_next
    return values


def _outputs() -> list[Any]:
    main = sys.modules.get("__main__")
    outputs = getattr(main, "Out", None)
    return list(outputs.values()) if isinstance(outputs, dict) else []
