"""A device of a given size, in pure Python: raises what CUDA would, at the same operation each time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from buoy.torch import memory
from buoy.units import format_bytes, parse_bytes


class AllocationWatch(TorchDispatchMode):
    """Counts the bytes of every tensor that operations inside the `with` block make or use."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes of storages that exist."""
        self.peak = 0
        """The most at once."""
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._before: memory.Memory | None = None

    def __enter__(self) -> Any:
        self._before, memory.pretended = memory.pretended, self
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        memory.pretended = self._before
        super().__exit__(*details)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._count(tensor)
        self.before(func)
        made = func(*args, **(kwargs or {}))
        new = sum(self._count(tensor) for tensor in _tensors(made))
        if new:
            self.after(func, new)
            self.peak = max(self.peak, self.live)
        return made

    def before(self, func: Any) -> None:
        """Called ahead of each operation."""

    def after(self, func: Any, new: int) -> None:
        """Called when an operation has made so many bytes of new storage."""

    def free(self) -> int | None:
        """Bytes left; None without a limit."""
        return None

    def used(self) -> int | None:
        """Bytes in use."""
        return self.live

    def mark(self) -> None:
        """Begin a new peak."""
        self.peak = self.live

    def highest(self) -> int | None:
        """The peak since `mark`."""
        return self.peak

    def _count(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return 0
        size = storage.nbytes()
        self.live += size

        def gone(_: object, key: int = key, size: int = size) -> None:
            if self._seen.pop(key, None) is not None:
                self.live -= size

        self._seen[key] = weakref.ref(storage, gone)
        return size


class byte_budget(AllocationWatch):  # noqa: N801 - used as a function: `with byte_budget("200MiB"):`
    """A device with so many bytes: what does not fit raises the `torch.OutOfMemoryError` that CUDA raises.

    Counts every tensor that operations inside the block make or use, on whatever device it is; temporaries inside a
    fused operation (an LSTM's) are not seen. Deterministic: the same program fails at the same operation.

    >>> with byte_budget("1MiB") as budget:
    ...     try:
    ...         torch.zeros(1 << 20)
    ...     except torch.OutOfMemoryError as error:
    ...         print(str(error).split(".")[0])
    CUDA out of memory
    """

    def __init__(self, size: str | int) -> None:
        super().__init__()
        self.size = parse_bytes(size) if isinstance(size, str) else size
        self.failures = 0
        """How often it was full."""

    def after(self, func: Any, new: int) -> None:
        """Full?"""
        if self.live > self.size:
            self.failures += 1
            raise out_of_memory(new, f"{format_bytes(self.size)} in all, of which {format_bytes(self.live - new)} "
                                     f"were in use; {func}")  # fmt: skip

    def free(self) -> int | None:
        """Bytes left."""
        return max(0, self.size - self.live)


def out_of_memory(size: int, words: str) -> torch.OutOfMemoryError:
    """As CUDA says it."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. (simulated: {words})"
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
