"""A device of a given size, in pure Python: raises what CUDA would, at the same operation each time."""

from __future__ import annotations

from typing import Any

import torch

from buoy.torch.memory import device
from buoy.torch.memory.device import AllocationWatch
from buoy.units import format_bytes, parse_bytes

_SMALL = 512  # bytes; CUDA serves less from a pool that it keeps


class PretendedDevice(AllocationWatch):  # type: ignore[no-untyped-call]
    """An AllocationWatch that buoy takes for the device's memory while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._before: device.Memory | None = None

    def __enter__(self) -> Any:
        self._before, device.pretended = device.pretended, self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> None:
        device.pretended = self._before
        super().__exit__(*details)  # type: ignore[no-untyped-call]

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


class byte_budget(PretendedDevice):  # type: ignore[no-untyped-call] # noqa: N801 - used as a function: `with byte_budget("200MiB"):`
    """A device with so many bytes: what does not fit raises the `torch.OutOfMemoryError` that CUDA raises.

    Counts every tensor that operations inside the block make or use, on whatever device it is; temporaries inside a
    fused operation (an LSTM's) are not seen, and requests of less than 512 bytes are never refused.
    Deterministic: the same program fails at the same operation.

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
        if self.live > self.size and new >= _SMALL:
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
