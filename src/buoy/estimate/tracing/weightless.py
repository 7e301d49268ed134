"""Building a model without its weights: each parameter has a shape and no bytes, and nothing moves to a device."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode

from buoy._compat.torch import parameters_of, tree_flatten, tree_map

LARGE_TENSOR = 1 << 20
"""Elements from which an empty tensor is not allocated while building."""


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give up each parameter's memory the moment a module takes it; other tensors stay real and can be read."""
    register = torch.nn.Module.register_parameter
    load = torch.nn.Module.load_state_dict

    def registered(module: Any, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        kept = parameters_of(module).get(name)
        if kept is not None and is_lazy(kept):
            options: Any = {"requires_grad": kept.requires_grad, "device": "meta", "dtype": kept.dtype}
            parameters_of(module)[name] = UninitializedParameter(**options)
        elif kept is not None and kept.device.type != "meta":
            empty = torch.empty_like(kept, device="meta")
            fresh = torch.nn.Parameter(empty, requires_grad=kept.requires_grad)
            fresh.__dict__.update(copy.copy(kept.__dict__))
            parameters_of(module)[name] = fresh

    torch.nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    torch.nn.Module.load_state_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
        torch.nn.Module.load_state_dict = load  # type: ignore[method-assign]


class StayOnHost(TorchFunctionMode):
    """While building, nothing moves: a model that sends itself to `cuda` is put there by the tracer later."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if named.get("device") is not None and torch.device(named["device"]).type == "cuda":
            named["device"] = "meta" if func is torch.Tensor.to and args[0].is_meta else "cpu"
        fresh = func is torch.empty and named.get("device") is None and "out" not in named
        if fresh and _numel(args, named) > LARGE_TENSOR:
            named["device"] = "meta"  # a weight to be: its bytes mean nothing yet, and are never needed
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], args[0].device, *args[2:])
        try:
            return func(*args, **named)
        except RuntimeError:
            # A forward pass while building, mostly to learn a shape: the weights have no bytes, so the rest needs none.
            if not _is_mixed((args, named)):
                raise
            bare = tree_map(without_bytes, (args, named))
            return func(*bare[0], **bare[1])


def shape_lazy_modules(model: torch.nn.Module, forward: Callable[[], object]) -> None:
    """Let the parameters that learn their shape from the first batch learn it."""
    if any(is_lazy(parameter) for parameter in model.parameters()):
        with torch.no_grad(), StayOnHost():
            forward()


def _is_mixed(values: Any) -> bool:
    kinds = {leaf.is_meta for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)}
    return len(kinds) == 2


def without_bytes(leaf: Any) -> Any:
    """A tensor's shape and dtype alone; what is no tensor stays."""
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _numel(args: tuple[Any, ...], named: dict[str, Any]) -> int:
    size = named.get("size", args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args)
    return math.prod(size) if all(isinstance(dimension, int) for dimension in size) else 0
