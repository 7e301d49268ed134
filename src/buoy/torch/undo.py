"""The way back from an optimizer's step that failed: copies of tensors, and plain values as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

_NOT_ITS_OWN = ("state", "param_groups", "step", "_opt_called", "_step_count")
"""Kept elsewhere, or written by what is around the step."""
_DEEP = 6
"""Containers in containers: one that holds itself has no end."""


class PlainValues:
    """What an optimizer counts and remembers besides tensors: options of groups, state, attributes.

    Tensors stay the ones they were; what is in them is not looked at.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], groups: list[dict[str, Any]]
    ) -> None:
        self._state = optimizer.state
        self._parameters = parameters
        self._known = {
            parameter: _kept(self._state[parameter]) for parameter in parameters if parameter in self._state
        }
        self._back = [_kept(group, besides=("params",)) for group in groups]
        self._back.append(_kept(vars(optimizer), besides=_NOT_ITS_OWN))

    def __call__(self) -> None:
        """As they were."""
        for parameter in self._parameters:
            if parameter in self._known:
                self._state[parameter] = self._known[parameter]()
            else:
                self._state.pop(parameter, None)
        for back in self._back:
            back()


class Undo:
    """Copies of some parameters and all that belongs to them, and the way back."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        groups: list[dict[str, Any]],
        whole: bool,
        copies: bool = True,
    ) -> None:
        self._plain = PlainValues(optimizer, parameters, groups)
        found: list[Any] = list(parameters)
        # A fused step with a gradient scale divides the gradients too; a closure makes others.
        self._grads = [(parameter, parameter.grad) for parameter in parameters] if whole else []
        if whole or getattr(optimizer, "grad_scale", None) is not None:
            found += [parameter.grad for parameter in parameters]
        state = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
        if whole and not is_lbfgs(optimizer):
            found += tensors_in([state, own_values(optimizer)])
        else:  # of the many gradients that LBFGS keeps in lists none is ever written to
            found += [value for values in state for value in values.values()]
        unique = {id(tensor): tensor for tensor in found if copies and isinstance(tensor, torch.Tensor)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in unique.values()]

    def __call__(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
        for parameter, gradient in self._grads:
            parameter.grad = gradient
        self._plain()


def is_lbfgs(optimizer: Optimizer) -> bool:
    """PyTorch's only optimizer that computes the loss several times in one step."""
    return isinstance(optimizer, torch.optim.LBFGS)


def own_values(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer of somebody else may count or remember in."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_ITS_OWN}


def tensors_in(value: Any, depth: int = _DEEP) -> Iterator[torch.Tensor]:
    """Every tensor in these containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)


def _kept(value: Any, besides: tuple[str, ...] = (), depth: int = _DEEP) -> Callable[[], Any]:
    """A function that gives the same object back, with what it holds now."""
    if not depth:
        return lambda: value
    if isinstance(value, dict):
        held = {key: _kept(item, (), depth - 1) for key, item in value.items() if key not in besides}

        def dict_back() -> Any:
            for key in [key for key in value if key not in held and key not in besides]:
                del value[key]
            for key, back in held.items():
                value[key] = back()
            return value

        return dict_back
    if isinstance(value, (list, deque)):
        items = [_kept(item, (), depth - 1) for item in value]

        def list_back() -> Any:
            then = [back() for back in items]
            value.clear()
            value.extend(then)
            return value

        return list_back
    if type(value) is set:
        members = set(value)

        def set_back() -> Any:
            value.clear()
            value.update(members)
            return value

        return set_back
    return lambda: value
