"""torchmetrics' metrics inside a model: what they have counted, which `state_dict()` and buffers do not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

State = dict[str, dict[str, Any]]


def counted(module: nn.Module) -> State:
    """What each metric inside has counted so far, copied."""
    return {name: _read(metric) for name, metric in _metrics(module)}


def put_back(module: nn.Module, state: State) -> None:
    """Make them what they were."""
    for name, metric in _metrics(module):
        if name in state:
            _write(metric, state[name])


def _metrics(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in module.named_modules() if hasattr(part, "_defaults")]


def _read(metric: Any) -> dict[str, Any]:
    values = {name: _copy(getattr(metric, name)) for name in metric._defaults}
    return {"values": values, "updates": metric._update_count, "latest": _copy(metric._forward_cache)}


def _write(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state["values"].items():
        now = getattr(metric, name)
        device = now.device if isinstance(now, torch.Tensor) else metric.device
        setattr(metric, name, _copy(value, device))
    metric._update_count = state["updates"]
    metric._forward_cache = _copy(state["latest"])
    metric._computed = None


def _copy(value: Any, device: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, list):
        return [_copy(item, device) for item in value]
    return value
