"""What stands for a GPU that tells how much it has left; the allocator that fills it is real."""

from __future__ import annotations

from buoy.keras.memory.device import Memory
from buoy.testing import shim


class Small(Memory):
    """A device of so many bytes, as the real allocator counts them."""

    def __init__(self, limit: int) -> None:
        self._limit, self._base = limit, 0

    def free(self) -> int:
        return self._limit - shim.read().live

    def mark(self, again: bool = False) -> None:
        shim.reset_peak()
        self._base = shim.read().live

    def rise(self) -> int:
        return shim.read().peak - self._base
