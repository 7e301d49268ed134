"""Decisions that must be the same on every rank: the identity on one process, a collective on several.

In each step ranks vote once with one integer, before the backward pass in which DDP exchanges gradients. Until then
nothing of a try is collective, so a rank that fails can say so instead of leaving the others waiting.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from buoy._compat import torch as compat
from buoy.errors import UsageError
from buoy.microbatch.errors import CannotSplit

READY = 1 << 30
"""Votes: ready; a smaller number asks for micro-batches of at most that size; 0 gives up."""
GIVE_UP = 0

_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


class Vote:
    """The group that some modules train in."""

    def __init__(self) -> None:
        self.replicas: list[DistributedDataParallel] = []
        """Empty outside of DDP: then nothing here has to be asked."""
        self._exchanging: list[DistributedDataParallel] = []

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Find DDP; refuse what cannot be voted on."""
        for module in modules:
            for part in module.modules():
                names = {base.__name__ for base in type(part).__mro__}
                if names & _SHARDED:
                    raise CannotSplit(
                        "sharded parameters (FSDP) cannot be recovered",
                        received=type(part).__name__,
                        expected="DistributedDataParallel, or one process",
                        hint="a rank that runs out of memory leaves the others inside a collective; call "
                             "loss.backward() yourself, checkpoints work as before",
                    )  # fmt: skip
                if isinstance(part, DistributedDataParallel):
                    if part.static_graph:
                        raise CannotSplit(
                            "DistributedDataParallel with static_graph=True cannot be recovered",
                            received="static_graph=True",
                            expected="a graph that allows more than one backward pass per step",
                            hint="leave it out: DDP counts the backward passes of its first step and would exchange no "
                                 "gradients; with activation checkpointing use_reentrant=False; or call "
                                 "loss.backward() yourself, checkpoints work as before",
                        )  # fmt: skip
                    if part not in self.replicas:
                        self.replicas.append(part)

    def find(self, modules: list[torch.nn.Module]) -> None:
        """Where `ddp.module` is tracked, only the loss function knows the DDP around it."""
        if self.replicas or not is_up() or dist.get_world_size() == 1:
            return
        known = {id(parameter) for module in modules for parameter in module.parameters()}
        around = [each for each in gc.get_objects() if _is_around(each)]
        self.watch(each for each in around if any(id(p) in known for p in each.parameters()))

    @property
    def is_group(self) -> bool:
        """More than one process trains this together."""
        return bool(self.replicas) and dist.is_initialized() and dist.get_world_size(self._group) > 1

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.replicas[0].process_group

    def lowest(self, vote: int) -> int:
        """The lowest vote of all ranks."""
        if not self.is_group:
            return vote
        device = self.replicas[0].device if dist.get_backend(self._group) == "nccl" else torch.device("cpu")
        ballot = torch.tensor([vote], dtype=torch.int64, device=device or "cuda")
        dist.all_reduce(ballot, dist.ReduceOp.MIN, group=self._group)
        return int(ballot.item())

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing inside is collective: what DDP would do within a forward pass is done now, or left out."""
        exchanging = [replica.require_backward_grad_sync for replica in self.replicas]
        for replica in self.replicas:
            if compat.joins(replica):
                raise CannotSplit(
                    "DistributedDataParallel cannot be recovered inside `join()`",
                    received="model.join(), in which ranks that are done answer for DDP's exchanges only",
                    expected="the same number of batches on every rank",
                    hint="`drop_last=True` in the loader and its DistributedSampler, and no `join()`; or call "
                         "loss.backward() yourself, checkpoints work as before",
                )  # fmt: skip
            compat.rebuild_buckets(replica)
            if replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                compat.sync_buffers(replica)
        with ExitStack() as stack:
            for replica in self.replicas:
                stack.enter_context(replica.no_sync())
                replica.require_forward_param_sync = False
            self._exchanging = [replica for replica, on in zip(self.replicas, exchanging, strict=True) if on]
            yield
        for replica in self._exchanging:
            replica.require_forward_param_sync = True

    def exchange(self, loss: torch.Tensor) -> None:
        """Let the backward pass that follows, of this loss, exchange gradients, as DDP's forward would have."""
        for replica in self._exchanging:
            replica.reducer.prepare_for_forward()
            unused = replica.find_unused_parameters and not replica.static_graph
            replica.reducer.prepare_for_backward([loss] if unused else [])


def _is_around(thing: object) -> bool:
    kinds = {base.__name__ for base in type(thing).__mro__}
    return issubclass(type(thing), torch.nn.Module) and bool(kinds & {*_SHARDED, "DistributedDataParallel"})


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
