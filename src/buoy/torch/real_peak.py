"""What the GPU's allocator held at most in this process, to compare a plan with."""

from __future__ import annotations

from typing import Any

import torch


def read() -> dict[str, Any] | None:
    """`{"name", "total", "reserved"}` of the device in use; None where no GPU was."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return {
        "name": torch.cuda.get_device_name(),
        "total": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        "reserved": torch.cuda.max_memory_reserved(),
    }
