"""A script's calls and the tensors in what they are given and return: found, replaced, and known by where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


@dataclass(slots=True)
class Call:
    """One call of the step: a module or a function, and what it was given."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    sources: dict[int, From]
    """Where its tensors came from then: what is changed in place comes from elsewhere later."""


@dataclass(frozen=True, slots=True)
class From:
    """Where a tensor comes from: an earlier call's result."""

    call: int
    path: tuple[Any, ...]


@dataclass(slots=True)
class SeenTurn:
    """An optimizer's step and the losses that were differentiated for it."""

    optimizer: torch.optim.Optimizer
    losses: list[tuple[From, bool]]
    """Each with whether its graph was kept."""
    calls: int
    """How many calls had been made by then."""


def changed_tensors(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensors changed by `add_`, `-=` and `p.data = ...`; none by `__get__`, which reads `p.grad`."""
    name: str = func.__name__
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if not in_place and func is not torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return []
    return [tensor for _, tensor in tensors_in(args[0])]


def remembered_as_buffers(holder: nn.Module) -> None:
    """Tensors that a module keeps as plain attributes, such as a mask made in its first call, go where it goes."""
    for module in holder.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor in nested tuples, lists and mappings, with the way to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, (*path, index))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: mapped(inner, change) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(inner, change) for inner in value)
    if isinstance(value, Mapping):  # a tokenizer's batch
        return {key: mapped(inner, change) for key, inner in value.items()}
    return value


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """What lies at the end of a way."""
    for key in path:
        value = value[key]
    return value
