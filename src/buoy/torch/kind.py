"""What kind of step this is: the loss function, the model's switches and the make of the batch, as one hashable value.

Asked at every step that is cut, so it reads little: flags, types, and a few reductions of what may be labels or masks.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from buoy.microbatch.asked import traits
from buoy.microbatch.split import Batch

_LARGE = 1 << 20  # elements: masks are mostly smaller, and images not
_DEPTH = 3  # functions that a loss function calls by a name of its own: mostly one or two


def kind_of(modules: list[torch.nn.Module], whole: Batch, loss_fn: Any, reduction: str) -> Hashable:
    """Equal for steps that compute the same with other numbers: what is computed, and what the batch is like."""
    flags = tuple([part.training for module in modules for part in module.modules()])
    trained = tuple([parameter.requires_grad for module in modules for parameter in module.parameters()])
    computes = (_code(loss_fn, _DEPTH), reduction, whole.gives_ranges_only, hash(flags), hash(trained))
    return computes, _make(whole)


def _code(function: Any, depth: int) -> Hashable:
    """Of a function and those it knows by name; a lambda that is written anew for each batch is the same one."""
    function = getattr(function, "__wrapped__", function)  # first: around it may be mixed precision
    if isinstance(function, functools.partial):
        return _code(function.func, depth)
    if isinstance(function, MethodType):
        return _code(function.__func__, depth)
    if not isinstance(function, FunctionType):
        if isinstance(function, torch.nn.Module):
            return str(type(function)), str(vars(function).get("reduction"))
        return str(type(function))
    code: CodeType = function.__code__
    if not depth:
        return code
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    held += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    known = (_known(value, depth - 1) for value in [*held, *(function.__defaults__ or ())])
    return code, tuple(value for value in known if value is not None)


def _known(value: Any, depth: int) -> Hashable:
    """Of what a loss function refers to: other functions, losses, switches. Numbers may be counters."""
    if isinstance(value, (FunctionType, functools.partial, MethodType)):
        return _code(value, depth)
    if isinstance(value, torch.nn.Module):
        return _code(value, 0)
    return value if isinstance(value, (bool, str)) else None


def _make(whole: Batch) -> Hashable:
    """Types and dimensions of its arrays; of labels and masks also whether something is ignored, padded or constant."""
    made, read = [], []
    for array in whole.arrays:
        made.append((type(array), str(getattr(array, "dtype", "")), len(array.shape)))
        if isinstance(array, torch.Tensor) and array.layout == torch.strided and array.numel():
            if array.is_floating_point() and array.numel() > _LARGE:
                continue
            try:
                read.append(_read(array.detach()))
            except RuntimeError:  # a dtype without a least number, or no room: told by its type alone
                made.append((type(array), "unread", 0))
    found = [_traits(*numbers) for numbers in _to_host(read)]
    measured = [traits for traits, is_measured in found if is_measured]
    # In how many: which ones would make, of the columns of a table alone, more kinds than are counted.
    missing = tuple(sum(each) for each in zip(*measured, strict=True))
    return tuple(made), missing, tuple(traits for traits, is_measured in found if not is_measured)


def _read(array: torch.Tensor) -> torch.Tensor:
    """Least, largest, how many zeros, how many ones, how many in all."""
    if array.is_complex():
        return torch.zeros(5, dtype=torch.float64)
    if array.dtype == torch.bool:
        array = array.byte()
    numbers = [array.min(), array.max(), (array == 0).sum(), (array == 1).sum()]
    whole = torch.float32 if array.device.type == "mps" else torch.float64
    is_counted = torch.tensor(-1.0 if array.is_floating_point() else 0.0, device=array.device, dtype=whole)
    return torch.stack([*(number.to(whole) for number in numbers), is_counted * array.numel()])


def _to_host(read: list[torch.Tensor]) -> list[list[float]]:
    """All at once for each device: a reading stops its queue."""
    if len({numbers.device for numbers in read}) == 1:
        return torch.stack(read).tolist()
    return [numbers.tolist() for numbers in read]


def _traits(
    least: float, largest: float, zeros: float, ones: float, floats: float
) -> tuple[tuple[bool, ...], bool]:
    if floats and zeros + ones != -floats:
        return (least != least, least < 0, zeros > 0), True  # what is missing among measurements
    return traits(least, largest, zeros > 0), False
