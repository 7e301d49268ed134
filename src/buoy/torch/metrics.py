"""torchmetrics' metrics inside a model: what they have counted, which `state_dict()` and buffers do not hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class BatchValues:
    """The value for a whole batch of metrics that are called with its parts: each has a second one beside it."""

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [metric for _, metric in _metrics(module)]
        self._beside: dict[int, Any] = {}
        self._called: set[int] = set()

    def clear(self) -> None:
        """A try begins."""
        for number in self._called:
            self._beside[number].reset()
        self._called.clear()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within it what a metric is called with goes to the one beside it too."""
        for number, metric in enumerate(self._metrics):
            with suppress(Exception):  # one that cannot be copied shows its last part
                if number not in self._beside:
                    beside = metric.clone()
                    beside.reset()
                    self._beside[number] = beside
                object.__setattr__(metric, "forward", self._both(number, metric.forward))
        try:
            yield
        finally:
            for metric in self._metrics:
                vars(metric).pop("forward", None)

    def put_in(self) -> None:
        """The step is done: what was last computed is the batch's."""
        for number in self._called:
            with suppress(Exception):  # a value that is not to be had of so few samples
                self._metrics[number]._forward_cache = self._beside[number].compute()

    def _both(self, number: int, forward: Any) -> Any:
        def both(*args: Any, **kwargs: Any) -> Any:
            self._called.add(number)
            self._beside[number].update(*args, **kwargs)
            return forward(*args, **kwargs)

        return both


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
