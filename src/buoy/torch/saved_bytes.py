"""Bytes that are kept for the backward pass, by the module that had them kept first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

OUTSIDE = "outside the model (the loss)"


class _Saved:
    """What autograd keeps in place of a tensor: when it goes, so does the tensor."""

    __slots__ = ("_address", "_released", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int, released: deque[int]) -> None:
        self.tensor, self._address, self._released = tensor, address, released

    def __del__(self) -> None:
        self._released.append(self._address)  # maybe from a thread of autograd's: only noted here


@dataclass(slots=True)
class _Block:
    module: str
    size: int
    users: int = 0


class SavedBytes:
    """Follows autograd's saved tensors from when they are saved until they are let go.

    What counts is memory: a block that several operations keep is counted once, and a block of a parameter, which is
    there anyway, not at all (`Linear` keeps its weight as a transposed view of it).
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        """The modules whose forward is under way, the innermost last."""
        self._blocks: dict[int, _Block] = {}
        self._sizes: dict[str, int] = {}
        self._total = self._highest_total = 0
        self._highest: dict[str, int] = {}
        self._released: deque[int] = deque()
        self._model: set[int] = set()
        self._inputs: set[int] = set()

    def forward_begins(self, model: Iterable[torch.Tensor], inputs: Any) -> None:
        """An outermost forward: these are the model's own tensors now, and this is what it is called with."""
        self._model = set(map(_address, model))
        tensors = (thing for thing in _pytree.tree_leaves(inputs) if isinstance(thing, torch.Tensor))
        self._inputs = set(map(_address, tensors))

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """To be entered around what is to be followed; what was saved inside may be used afterwards."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def at_peak(self) -> dict[str, int]:
        """Bytes by module when all of them together were at their highest, largest first."""
        self._note_peak()
        return dict(sorted(self._highest.items(), key=lambda item: -item[1]))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        address = _address(tensor)
        if not address or address in self._model:
            return tensor
        self._let_go()
        size = tensor.untyped_storage().nbytes()
        if not self.stack or address in self._inputs:  # a batch may be a slice of data that is there anyway
            size = min(size, tensor.numel() * tensor.element_size())
        block = self._blocks.get(address)
        if block is None:
            block = self._blocks[address] = _Block(self.stack[-1] if self.stack else OUTSIDE, 0)
        block.users += 1
        if size > block.size:
            self._change(block.module, size - block.size)
            block.size = size
        return _Saved(tensor, address, self._released)

    def _let_go(self) -> None:
        if self._released:
            self._note_peak()
        while self._released:
            address = self._released.popleft()
            block = self._blocks[address]
            block.users -= 1
            if not block.users:
                self._change(block.module, -block.size)
                del self._blocks[address]

    def _change(self, module: str, by: int) -> None:
        self._sizes[module] = self._sizes.get(module, 0) + by
        self._total += by

    def _note_peak(self) -> None:
        if self._total > self._highest_total:
            self._highest_total = self._total
            self._highest = {module: size for module, size in self._sizes.items() if size}


def _address(tensor: torch.Tensor) -> int:
    """Of the memory that it lies in; 0 for one that has none of its own (sparse, fake)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved
