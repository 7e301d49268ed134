"""Weights that a comparison of whole and parts must leave alone: copied just before something writes to one.

A copy of all of them would take as much memory as the model. What writes to a weight while a gradient is computed is
a teacher that follows inside the loss function, an optimizer that steps in a hook, or a layer that keeps its own norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class SteppedInside(Exception):  # noqa: N818 - never leaves the comparison
    """An optimizer was about to step these weights while a gradient was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.in_backward = is_in_backward()


class Unmoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts back, at the end of the `with` block, every parameter of these modules that was written inside it."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._named: dict[str, torch.Tensor] = {}
        self._data: dict[str, torch.Tensor] = {}
        self._places: dict[int, list[str]] = {}
        for name, parameter in [pair for module in modules for pair in module.named_parameters()]:
            place = _place(parameter)
            if place:
                self._named[name], self._data[name] = parameter, parameter.detach()  # the same memory
                self._places.setdefault(place, []).append(name)
        self._copies: dict[str, torch.Tensor] = {}
        self.moved: dict[str, bool] = {}
        """Parameters that were written, and whether inside the backward pass."""

    def __enter__(self) -> Unmoved:
        self._hook = register_optimizer_step_pre_hook(self._refuse)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        """As before; the weights that a person gave another memory get their own again."""
        with _disable_current_modes(), torch.no_grad():
            for name, parameter in self._named.items():
                if _place(parameter) != _place(self._data[name]):
                    parameter.data = self._data[name]
            for name, copy in self._copies.items():
                self._named[name].copy_(copy)
        self._copies = {}

    def written(self) -> dict[str, torch.Tensor]:
        """The parameters that were written, as they are now."""
        return {name: self._named[name] for name in self.moved}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for number, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[number] if number < len(args) else kwargs.get(argument.name)
                    for tensor in tree_leaves(value):
                        self._keep(tensor)
        return func(*args, **kwargs)

    def _keep(self, tensor: Any) -> None:
        for name in self._places.get(_place(tensor), ()):
            if name not in self._copies:
                with _disable_current_modes():
                    self._copies[name] = self._data[name].clone()
                self.moved.setdefault(name, is_in_backward())

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Others may step: an inner loop on weights of its own, a training in another thread."""
        mine = {id(parameter) for parameter in self._named.values()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise SteppedInside


def _place(tensor: Any) -> int:
    """Where its memory begins; 0 without memory of its own, as quantized and other wrapped tensors have it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def is_in_backward() -> bool:
    """Whether gradients are being computed, and a hook of theirs asks."""
    return torch._C._current_graph_task_id() != -1
