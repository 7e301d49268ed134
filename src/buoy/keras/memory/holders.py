"""What holds memory in this process now: variables by owner, tensors, arrays, outputs, an old traceback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from buoy.machine import variables


def holders(models: Iterable[Any] = (), optimizers: Iterable[Any] = ()) -> variables.Held:
    """Bytes by owner, largest first. Each variable is counted once, for the first owner that fits."""
    models = list(models)
    owners: dict[str, Iterable[Any]] = {
        "parameters": (v for model in models for v in model.weights),
        "optimizer state": (v for optimizer in optimizers for v in optimizer.variables),
        "metrics": (v for model in models for v in getattr(model, "metrics_variables", ())),
    }
    return variables.by_owner({owner: map(_value, things) for owner, things in owners.items()})


def _value(variable: Any) -> Any:
    """The variable of TensorFlow in one of Keras; of one that a strategy has mirrored, the first replica's."""
    value = variable.value if type(variable).__module__.startswith("keras") else variable
    return next(iter(getattr(value, "values", ())), value)
