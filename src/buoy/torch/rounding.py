"""How much of a gradient is rounding: the same computation with every number moved by its last bit, at random.

Close to its goal a training subtracts nearly equal numbers: what is left of them, and so the whole gradient, may be
rounding. The same samples in another order do not show that, as each is still computed by the same kernel; parts of a
batch are computed by others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from buoy.microbatch.rounding import TIMES
from buoy.microbatch.split import Batch


class Nudged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves what operations read by up to one unit in the last place; parameters, which may be large, are left."""

    def __init__(self, parameters: list[torch.Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {parameter.data_ptr() for parameter in parameters}
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in func._schema.name:  # writes its statistics, which its schema does not say
            args = (self._moved(args[0]), *args[1:])
        # A view, or an operation in place: what it reads must be the thing itself.
        elif not any(argument.alias_info is not None for argument in func._schema.arguments):
            args = tree_map(self._moved, tuple(args))
        return func(*args, **(kwargs or {}))

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        if value.layout != torch.strided or value.data_ptr() in self._parameters:
            return value
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        last = torch.finfo(value.dtype).eps
        real = value.dtype.to_real() if value.is_complex() else value.dtype
        moved = torch.empty(value.shape, dtype=real, device=value.device)
        return value * moved.uniform_(-last, last, generator=generator).add_(1)


def alike(
    whole: list[torch.Tensor], parts: list[torch.Tensor], rounded: list[list[torch.Tensor]], tolerance: float
) -> bool:
    """Equal but for rounding, of which the other gradients of the whole are examples."""
    whole, parts = list(map(_real, whole)), list(map(_real, parts))
    rounded = [list(map(_real, again)) for again in rounded]
    norm = sum(float(g.double().square().sum()) for g in whole) ** 0.5
    for number, (one, other) in enumerate(zip(whole, parts, strict=True)):
        if one.shape != other.shape:
            return False
        rounding = max((_distance(one, again[number]) for again in rounded), default=0.0)
        allowed = tolerance * (float(one.double().norm()) + 1e-3 * norm) + TIMES * rounding
        if not _distance(one, other) <= allowed:
            return False
    return True


def _real(values: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(values) if values.is_complex() else values


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm()) if one.shape == other.shape else 0.0


def disturbed(few: Batch) -> Batch:
    """The same samples with other numbers and with each other's labels: nothing that a model has learned."""
    other = Batch(few.pick(list(range(few.samples))))
    generator = torch.Generator().manual_seed(0)
    for number, array in enumerate(other.arrays):
        if not isinstance(array, torch.Tensor) or not array.dim():
            continue
        if array.is_floating_point() or array.is_complex():
            array.mul_(torch.rand(array.shape, generator=generator).to(array) + 0.5)
        else:
            array.copy_(array.flip(-1) if number == 0 and array.dim() > 1 else array.roll(number, 0))
    return other
