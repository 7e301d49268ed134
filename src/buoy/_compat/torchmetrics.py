"""torchmetrics' private names: what its metrics have counted. Checked on 1.9; the library is never imported for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_metric(module: Any) -> bool:
    """A metric, by what it has."""
    return callable(getattr(module, "persistent", None)) and hasattr(module, "_defaults")


def forgets_its_counts(module: Any) -> bool:
    """A metric whose counts are not in its `state_dict`, as they are not by default."""
    return is_metric(module) and not any(getattr(module, "_persistent", {}).values())


def read_counts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What each metric inside (by its path) has counted, copied: no public name gives the number of its updates."""
    return {
        path: {
            "values": {name: _copied(getattr(metric, name)) for name in metric._defaults},
            "updates": metric._update_count,
            "latest": _copied(metric._forward_cache),
        }
        for path, metric in _metrics(module)
    }


def write_counts(module: nn.Module, counts: dict[str, dict[str, Any]]) -> None:
    """Make each what it was."""
    for path, metric in _metrics(module):
        if path in counts:
            for name, value in counts[path]["values"].items():
                now = getattr(metric, name)
                setattr(
                    metric,
                    name,
                    _copied(value, now.device if isinstance(now, torch.Tensor) else metric.device),
                )
            metric._update_count = counts[path]["updates"]
            metric._forward_cache = _copied(counts[path]["latest"])
            metric._computed = None


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, part) for path, part in module.named_modules() if hasattr(part, "_defaults"))


def _copied(value: Any, device: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    return [_copied(item, device) for item in value] if isinstance(value, list) else value
