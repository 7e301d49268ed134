"""`memory_cap` for a PyTorch process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from buoy.machine import cap as shared


def set_cap(cap: str | int, say: Callable[[str], object]) -> None:
    """Let this process have so many bytes in all; refused where there is a GPU."""
    shared.set_cap(cap, say, gpu=torch.cuda.is_available())
