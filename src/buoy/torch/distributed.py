"""Decisions that must be the same on every rank: the identity on one process, a collective on several."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from buoy.errors import UsageError

_group: Any = None


def world() -> tuple[int, int]:
    """This process's rank, and how many ranks there are."""
    if is_up():
        return dist.get_rank(), dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise UsageError(
            "the ranks cannot agree on when to save yet",
            received=f"WORLD_SIZE={size}, and no process group",
            expected="a process group before `buoy.Run` is built",
            hint="call `torch.distributed.init_process_group()` first",
        )
    return 0, 1


def is_up() -> bool:
    """Whether there is a process group; a script may take it down before the process ends."""
    return dist.is_available() and dist.is_initialized()


def agree(value: int) -> int:
    """The largest value any rank has; every rank must ask at the same point.

    >>> agree(3)
    3
    """
    if world()[1] == 1:
        return value
    number = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=_cpu_group())
    return int(number.item())


def gather(value: object) -> list[Any]:
    """Every rank's value, in the order of the ranks; empty on all ranks but the first."""
    rank, size = world()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.gather_object(value, values if rank == 0 else None, dst=0, group=_cpu_group())
    return values if rank == 0 else []


def _cpu_group() -> Any:
    """The ranks' own channel for small numbers: NCCL's takes none from the CPU, and a gradient may be on its way."""
    global _group
    if _group is None:
        _group = dist.new_group(backend="gloo")
    return _group
