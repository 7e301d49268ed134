"""How much of a gradient is rounding: the same computation with every number moved by its last bit, at random.

Close to its goal a training subtracts nearly equal numbers: what is left of them, and so the whole gradient, may be
rounding. The same samples in another order do not show that, as each is still computed by the same kernel; parts of a
batch are computed by others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from buoy._compat import torch as compat
from buoy._compat.torch import TorchDispatchMode, tree_leaves, tree_map
from buoy.microbatch.batch import Batch

# Beside operations on each number alone: they read and write, and add nothing up.
_MOVES_ONLY = frozenset(
    {compat.TO_COPY, compat.UNSAFE_VIEW, "amax", "amin", "cat", "constant_pad_nd", "embedding", "empty_like", "flip",
     "full_like", "gather", "index", "index_put", "index_select", "masked_select", "max", "min", "new_empty",
     "new_full", "new_ones", "new_zeros", "one_hot", "ones_like", "repeat", "repeat_interleave", "roll", "scatter",
     "sort", "stack", "topk", "tril", "triu", "zeros_like"}
)  # fmt: skip


class Nudged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves what operations read by up to one unit in the last place, if rounding may have made it another one.

    Numbers of the batch are the same in whole and parts, and so is what is computed from each alone: the cell that a
    box lies in must not become the next one. Whole numbers may be indices. Parameters may be large.
    """

    def __init__(self, parameters: list[torch.Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {parameter.data_ptr() for parameter in parameters}
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._summed = WeakIdKeyDictionary()
        """Tensors that a sum of several numbers went into: in parts of a batch another kernel may compute it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = compat.schema_of(func)
        is_alias = any(argument.alias_info is not None for argument in schema.arguments)
        name = schema.name.removeprefix("aten::")
        read = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        sums = any(each in self._summed for each in read) or (
            bool(read) and not (is_alias or torch.Tag.pointwise in func.tags or name in _MOVES_ONLY)
        )
        if "batch_norm" in name:  # writes its statistics, which its schema does not say
            args = (self._moved(args[0]), *args[1:])
        # A view, or an operation in place: what it reads must be the thing itself.
        elif not is_alias:
            args = tree_map(self._moved, tuple(args))
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made) if sums else []:
            if isinstance(each, torch.Tensor):
                self._summed[each] = True
        return made

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        if value.layout != torch.strided or value.data_ptr() in self._parameters or value not in self._summed:
            return value
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        last = torch.finfo(value.dtype).eps
        real = value.dtype.to_real() if value.is_complex() else value.dtype
        moved = torch.empty(value.shape, dtype=real, device=value.device)
        moved = value * moved.uniform_(-last, last, generator=generator).add_(1)
        # A class or the number of an image, held as a float: moved by a bit and made an integer it is another one.
        return moved if value.is_complex() else torch.where(value == value.round(), value, moved)


def disturbed(few: Batch) -> Batch:
    """The same samples with other numbers and with each other's labels: nothing that a model has learned."""
    other = few.picked(list(range(few.samples)))
    generator = torch.Generator().manual_seed(0)
    for number, array in enumerate(other.arrays):
        if not isinstance(array, torch.Tensor) or not array.dim():
            continue
        if array.is_floating_point() or array.is_complex():
            array.mul_(torch.rand(array.shape, generator=generator).to(array) + 0.5)
        else:
            array.copy_(array.flip(-1) if number == 0 and array.dim() > 1 else array.roll(number, 0))
    return other
