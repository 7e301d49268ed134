"""How much memory the model's device has left, and how far a piece of work rose above what was there before it.

What TensorFlow's allocator held at most on the GPU in this process, to compare a plan with.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import Any

import tensorflow as tf

from buoy._compat.tensorflow import device_limit
from buoy.machine import limits
from buoy.machine.memory import HostMemory, host_memory

_PATIENCE = 0.1  # seconds for which a reading is good
_USABLE = 0.8  # of what the pool holds unused: regions do not join, and scratch of oneDNN is not counted


class Memory(ABC):
    """A device's memory."""

    shared = False
    """Whether others take from it too: what fitted once may not fit again."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that can still be had; None when nothing tells."""

    @abstractmethod
    def mark(self, again: bool = False) -> None:
        """Begin to watch; `again`: where the same was done before, and what it freed would be used once more."""

    @abstractmethod
    def rise(self) -> int | None:
        """The most that was in use at once since `mark`, above what was in use then."""

    def left(self) -> int | None:
        """Bytes until the end itself: nearer to it than `free`, for what is refused and not planned."""
        return self.free()

    def grown(self) -> int | None:
        """The most that was taken from the system since `mark`, where that is less: not all that counts is touched."""
        return self.rise()

    def give_back(self) -> bool:
        """Return what is kept for later to the system; False where that makes no difference."""
        return False


def memory_of(model: Any) -> Memory | None:
    """The memory behind the model's weights; None where nothing tells."""
    device = model.weights[0].value.device if model.weights else ""
    name = device.rsplit("device:", 1)[-1]
    if name.startswith("GPU"):
        limit = device_limit(device)
        return GpuMemory(name, limit) if limit is not None else None
    return session_memory() if name.startswith("CPU") else None


class GpuMemory(Memory):
    """What TensorFlow's allocator may have on a GPU, less what is live."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit, self._base = name, limit, 0

    def free(self) -> int | None:
        """Up to the allocator's limit, which TensorFlow has taken from the driver at its start."""
        return self._limit - _allocated(self._name)["current"]

    def mark(self, again: bool = False) -> None:
        """Begin a new peak."""
        tf.config.experimental.reset_memory_stats(self._name)
        self._base = _allocated(self._name)["current"]

    def rise(self) -> int | None:
        """By the allocator's own count."""
        return _allocated(self._name)["peak"] - self._base


class SessionMemory(Memory):
    """The session's RAM. With oneDNN TensorFlow has a pool that it never gives back: what is unused there is free."""

    shared = True

    def __init__(self) -> None:
        self._host: HostMemory = host_memory()
        self._counts = _counts()
        self._base = self._base_resident = 0
        self._highest = _allocated(_CPU)["peak"] if self._counts else 0
        """The most that the pool ever had live."""
        self._beside = (self._host.used() or 0) - self._highest
        """Resident when it was first looked at, and not TensorFlow's."""
        self._read_at, self._free = 0.0, None

    _free: int | None

    def free(self) -> int | None:
        """Bytes until the session's budget."""
        now = time.monotonic()
        if now - self._read_at > _PATIENCE:
            self._free, self._read_at = self._free_now(), now
        return self._free

    def left(self) -> int | None:
        """Bytes until the kernel would kill."""
        left = self._host.left()
        return None if left is None else left + self._unused()

    def mark(self, again: bool = False) -> None:
        """Begin a new peak."""
        if again or not self._counts:
            # What is freed, kept and used again would not show: arrays of less than 256 KiB are never counted.
            self._host.trim()
        if self._counts:
            self._look()
            tf.config.experimental.reset_memory_stats(_CPU)
            self._base = _allocated(_CPU)["current"]
        self._base_resident = self._host.used() or 0
        self._host.mark()

    def rise(self) -> int | None:
        """By the allocator's count, or by what was resident where that is more: oneDNN's scratch is not counted."""
        resident = self.grown()
        counted = self._look() - self._base if self._counts else None
        known = [value for value in (resident, counted) if value is not None]
        self._read_at = 0.0
        return max(known) if known else None

    def grown(self) -> int | None:
        """By what was resident. The pool counts whole chunks, up to twice what is asked for and touched."""
        highest = self._host.highest()
        return None if highest is None else highest - self._base_resident

    def give_back(self) -> bool:
        """What the C library keeps."""
        self._host.give_back()
        self._read_at = 0.0
        return True

    def _free_now(self) -> int | None:
        free = self._host.free_now()
        return None if free is None else free + self._unused()

    def _unused(self) -> int:
        """Bytes that the pool holds for the next request."""
        if not self._counts:
            return 0
        self._look()
        resident = self._host.used() or 0
        held = min(self._highest, resident - self._beside)  # a reserve that was never touched is not resident
        return max(0, int((held - _allocated(_CPU)["current"]) * _USABLE))

    def _look(self) -> int:
        peak = int(_allocated(_CPU)["peak"])
        self._highest = max(self._highest, peak)
        return peak


_CPU = "CPU:0"
_session: tuple[int, SessionMemory] | None = None


def session_memory() -> SessionMemory:
    """This process's one reader: a second training must know what the first one has left in the pool."""
    global _session
    if _session is None or _session[0] != os.getpid():
        _session = (os.getpid(), SessionMemory())
    return _session[1]


def _allocated(name: str) -> dict[str, int]:
    return dict(tf.config.experimental.get_memory_info(name))


def _counts() -> bool:
    """Whether the CPU's allocator counts; only oneDNN's does."""
    try:
        _allocated(_CPU)
        return True
    except ValueError:
        return False


def read() -> dict[str, Any] | None:
    """`{"name", "total", "allocated"}` of the device in use; None where no GPU was."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    card = limits.read().gpus[0]
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"name": str(card["name"]), "total": int(card["total"]), "allocated": int(peak)}
