"""What holds memory in this process now: variables by owner, tensors, arrays, outputs, an old traceback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from buoy.machine import heap


def holders(models: Iterable[Any] = (), optimizers: Iterable[Any] = ()) -> heap.Held:
    """Bytes by owner, largest first. Each variable is counted once, for the first owner that fits."""
    models = list(models)
    owners: dict[str, Iterable[Any]] = {
        "parameters": (v for model in models for v in model.weights),
        "optimizer state": (v for optimizer in optimizers for v in optimizer.variables),
        "metrics": (v for model in models for v in getattr(model, "metrics_variables", ())),
    }
    kinds: dict[str, heap.Size] = {
        "variable": _variable,
        "tensor": _tensor,
        "NumPy array": heap.array,
        "data frame": heap.data_frame,
    }
    return heap.by_owner(owners, _variable, kinds)


def _variable(thing: Any) -> tuple[int, int] | None:
    value = getattr(thing, "value", None) if type(thing).__module__.startswith("keras") else thing
    if not isinstance(value, tf.Variable):
        return None
    # Two Python objects can stand for one variable: its handle tells.
    return id(value.handle), int(value.shape.num_elements() or 0) * value.dtype.size


def _tensor(thing: Any) -> tuple[int, int] | None:
    if not isinstance(thing, tf.Tensor) or not hasattr(thing, "numpy"):
        return None  # a symbolic tensor holds nothing
    if thing.dtype.size == 0 or thing.dtype in (tf.resource, tf.variant, tf.string):
        return None
    return id(thing), int(thing.shape.num_elements() or 0) * thing.dtype.size
