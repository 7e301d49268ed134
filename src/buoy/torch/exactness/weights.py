"""Weights that a comparison of whole and parts must leave alone: copied just before something writes to one.

A copy of all of them would take as much memory as the model. What writes to a weight while a gradient is computed is
a teacher that follows inside the loss function, an optimizer that steps in a hook, or a layer that keeps its own norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from buoy._compat import torch as compat
from buoy._compat.torch import is_in_backward, tree_leaves
from buoy.microbatch.exactness import Refused


class SteppedInside(Refused):
    """An optimizer was about to step these weights while a gradient was computed."""

    def __init__(self) -> None:
        where = (
            "inside the backward pass (in a gradient hook)" if is_in_backward() else "in the loss function"
        )
        super().__init__(
            f"an optimizer steps {where}: each micro-batch would be a step",
            "one `optimizer.step()` after run.backward(...); such a step can neither be split nor rolled back",
        )


class CopyOnWrite:
    """Every parameter of these modules that is written inside the `with` block can be restored after it.

    It must be shown each operation ahead: `FixedRandomness` does, as one more mode would cost a quarter of a trial's
    time.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._homes = places(modules, compat.parameters_of)
        self._named: dict[str, torch.Tensor] = {}
        self._data: dict[str, torch.Tensor] = {}
        self._places: dict[int, list[str]] = {}
        for label, (part, name) in self._homes.items():
            parameter = compat.parameters_of(part)[name]
            place = _place(parameter)
            if parameter is not None and place:
                self._named[label], self._data[label] = parameter, parameter.detach()  # the same memory
                self._places.setdefault(place, []).append(label)
        self._copies: dict[str, torch.Tensor] = {}
        self.moved: dict[str, bool] = {}
        """Parameters that were written, and whether inside the backward pass."""

    def __enter__(self) -> CopyOnWrite:
        self._hook = register_optimizer_step_pre_hook(self._refuse)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hook.remove()

    def restore(self) -> None:
        """As before; the weights that the user gave another memory get their own again."""
        with compat.without_modes(), torch.no_grad():
            for name, parameter in self._named.items():
                part, own = self._homes[name]
                if compat.parameters_of(part).get(own) is not parameter:
                    compat.parameters_of(part)[own] = parameter  # type: ignore[assignment]
                if _place(parameter) != _place(self._data[name]):
                    parameter.data = self._data[name]
            for name, copy in self._copies.items():
                self._named[name].copy_(copy)
        self._copies = {}

    def written(self) -> dict[str, torch.Tensor]:
        """The parameters that were written or given another memory, as they are now."""
        now = {name: compat.parameters_of(part).get(own) for name, (part, own) in self._homes.items()}
        for name, parameter in self._named.items():
            if now[name] is not parameter or _place(parameter) != _place(self._data[name]):
                self.moved.setdefault(name, False)
        return {name: value for name in self.moved if (value := now[name]) is not None}

    def see(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """This operation is about to run."""
        for number, name in _written(func):
            for tensor in tree_leaves(args[number] if number < len(args) else kwargs.get(name)):
                self._keep(tensor)

    def _keep(self, tensor: Any) -> None:
        for name in self._places.get(_place(tensor), ()):
            if name not in self._copies:
                with compat.without_modes():
                    self._copies[name] = self._data[name].clone()
                self.moved.setdefault(name, is_in_backward())

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Others may step: an inner loop on weights of its own, a training in another thread."""
        mine = {id(parameter) for parameter in self._named.values()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise SteppedInside


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Number and name of each argument that an operation writes to; reading a schema takes longer than to compute."""
    named = enumerate(compat.schema_of(func).arguments) if compat.schema_of(func).is_mutable else ()
    return tuple(
        (n, each.name) for n, each in named if each.alias_info is not None and each.alias_info.is_write
    )


def places(
    modules: list[torch.nn.Module], own: Callable[[torch.nn.Module], dict[str, Any]]
) -> dict[str, tuple[torch.nn.Module, str]]:
    """Where each parameter or buffer of these is: its module and its name there, by a label for users.

    A student and its teacher have the same names: of the second one they are told apart by its number.
    """
    found: dict[str, tuple[torch.nn.Module, str]] = {}
    for number, module in enumerate(modules, 1):
        for path, part in module.named_modules():
            for name in own(part):
                label = f"{path}.{name}".lstrip(".")
                found[f"{label} (of module {number})" if label in found else label] = part, name
    return found


def _place(tensor: Any) -> int:
    """Where its memory begins; 0 without memory of its own, as quantized and other wrapped tensors have it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
