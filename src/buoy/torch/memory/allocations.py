"""Counts the bytes of tensors as operations make them: what a device's allocator would tell, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from buoy._compat.torch import TorchDispatchMode, storage_key


class AllocationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every tensor that operations inside the `with` block make or use; what one frees itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes of storages that exist."""
        self.peak = 0
        """The most at once."""
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((*args, *kwargs.values()) if kwargs else args):
            self._count(tensor)
        self.before(func)
        made = func(*args, **(kwargs or {}))
        new = sum([self._count(tensor) for tensor in _tensors((made,))])
        if new:
            self.after(func, new)
            self.peak = max(self.peak, self.live)
        return made

    def before(self, func: Any) -> None:
        """Called ahead of each operation."""

    def after(self, func: Any, new: int) -> None:
        """Called when an operation has made so many bytes of new storage."""

    def _count(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._seen:
            return 0
        size = storage.nbytes()
        self.live += size

        def gone(_: object, key: int = key, size: int = size) -> None:
            if self._seen.pop(key, None) is not None:
                self.live -= size

        self._seen[key] = weakref.ref(storage, gone)
        return size


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """An operation takes and gives tensors, numbers and lists of them: a general walk took a third of the time."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided:
                found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found
