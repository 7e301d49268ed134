"""The memory of the training's device: what is left, what a piece of work took at its worst, what can be freed.

`AllocationWatch` counts the bytes of tensors as operations make them: what an allocator would say, on any device.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from buoy._compat.torch import TorchDispatchMode, storage_key
from buoy.machine.memory import HostMemory, host_memory
from buoy.microbatch.errors import chain
from buoy.microbatch.sizing import SPARE

__all__ = [
    "AllocationWatch",
    "CudaMemory",
    "HostMemory",
    "Memory",
    "UnknownMemory",
    "host_memory",
    "left_in",
    "limited",
    "memory_of",
    "release",
]


class Memory(Protocol):
    """A device's memory. `buoy.testing` puts its own in place of the real one."""

    def free(self) -> int | None:
        """Bytes that can still be had; None when nothing is known."""
        return None

    def used(self) -> int | None:
        """Bytes in use now."""
        return None

    def mark(self) -> None:
        """Begin to watch the highest use."""

    def highest(self) -> int | None:
        """The most that was in use at once since `mark`."""
        return None


pretended: Memory | None = None
"""Set by buoy.testing while a test stands in for the device."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory that it is in; for the CPU that of this session. Asked at every step, of which devices are dear."""
    if pretended is not None:
        return pretended
    if tensor.is_cpu:
        return host_memory()
    return CudaMemory(tensor.device) if tensor.is_cuda else UnknownMemory()


def left_in(memory: Memory, taken: int = 0) -> int | None:
    """Bytes that can still be had when so many more are taken; None when nothing tells."""
    free = memory.free()
    if free is None:
        return None
    return max(free - taken, SPARE) if isinstance(memory, HostMemory) else free - taken


def limited(memory: Memory) -> AbstractContextManager[None]:
    """What asks for more than there is raises: devices do so anyway, the host's kernel would kill."""
    return memory.limited() if isinstance(memory, HostMemory) else nullcontext()


class UnknownMemory(Memory):
    """A device of which nothing is known."""

    def mark(self) -> None:
        """Nothing to watch."""


class CudaMemory:
    """What the driver has free and what torch's allocator holds in reserve, less what is live."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int | None:
        """Free at the driver, plus cached by torch and unused."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + cached)

    def used(self) -> int | None:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def mark(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def highest(self) -> int | None:
        """The allocator's own peak."""
        return torch.cuda.max_memory_allocated(self._device)


def release(error: BaseException) -> None:
    """Free the tensors in the frames of this exception and in reference cycles, and the caches of the allocator.

    To be called outside of `except`: inside it the interpreter itself still holds the frames.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def read() -> dict[str, Any] | None:
    """`{"name", "total", "reserved"}` of the device in use; None where no GPU was."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return {
        "name": torch.cuda.get_device_name(),
        "total": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        "reserved": torch.cuda.max_memory_reserved(),
    }


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
