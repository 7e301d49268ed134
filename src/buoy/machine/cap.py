"""A cap on this process's memory: an exception at the line that asks for too much, in place of the kernel's kill."""

from __future__ import annotations

from collections.abc import Callable

from buoy.errors import UsageError
from buoy.machine.host_memory import host_memory
from buoy.units import format_bytes, parse_bytes


def set_cap(cap: str | int, say: Callable[[str], object], *, gpu: bool) -> None:
    """Let this process have so many bytes in all; more raises MemoryError, or the framework's words for it.

    The kernel counts private writable memory, touched or not, so the limit is set by what is resident now.
    """
    import resource

    size = parse_bytes(cap) if isinstance(cap, str) else cap
    if gpu:
        raise UsageError("memory_cap is for processes without a GPU", received=format_bytes(size),
                         expected="no CUDA device", hint="leave it out: the driver maps more than it uses")  # fmt: skip
    memory = host_memory()
    resident, data = memory.used(), memory.data_bytes()
    if resident is None or data is None:
        say("memory_cap has no effect here: /proc does not tell what this process holds")
        return
    if size <= resident:
        raise UsageError("memory_cap is less than this process already holds", received=format_bytes(size),
                         expected=f"more than {format_bytes(resident)}")  # fmt: skip
    limit = data + size - resident
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    memory.data_limit = limit
