"""Decisions that every process of a group must make alike. On one process each is the identity.

Ranks vote with one integer before the backward pass in which DDP exchanges gradients. Until then nothing of a try
is collective, so a rank that fails can say so instead of leaving the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from buoy.microbatch.errors import CannotSplit

READY = 1 << 30
"""Votes: ready; a smaller number asks for micro-batches of at most that size; 0 gives up."""
GIVE_UP = 0

_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


class Vote:
    """The group that some modules train in."""

    def __init__(self) -> None:
        self._replicas: list[DistributedDataParallel] = []
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
                            expected="a graph that may be gone through more often than once per step",
                            hint="leave it out: DDP counts the backward passes of its first step and would exchange no "
                                 "gradients; with activation checkpointing use_reentrant=False; or call "
                                 "loss.backward() yourself, checkpoints work as before",
                        )  # fmt: skip
                    if part not in self._replicas:
                        self._replicas.append(part)

    @property
    def is_group(self) -> bool:
        """More than one process trains this together."""
        return bool(self._replicas) and dist.is_initialized() and dist.get_world_size(self._group) > 1

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._replicas[0].process_group

    def lowest(self, vote: int) -> int:
        """The lowest vote of all ranks."""
        if not self.is_group:
            return vote
        device = self._replicas[0].device if dist.get_backend(self._group) == "nccl" else torch.device("cpu")
        ballot = torch.tensor([vote], dtype=torch.int64, device=device or "cuda")
        dist.all_reduce(ballot, dist.ReduceOp.MIN, group=self._group)
        return int(ballot.item())

    def quiet(self) -> AbstractContextManager[None]:
        """Nothing inside is collective: what DDP would do within a forward pass is done now, or left out."""
        return self._quiet_group() if self.is_group else nullcontext()

    @contextmanager
    def _quiet_group(self) -> Iterator[None]:
        exchanging = [replica.require_backward_grad_sync for replica in self._replicas]
        for replica in self._replicas:
            if replica._join_config.enable:
                raise CannotSplit(
                    "DistributedDataParallel cannot be recovered inside `join()`",
                    received="model.join(), in which ranks that are done answer for DDP's exchanges only",
                    expected="as many batches on every rank",
                    hint="`drop_last=True` in the loader and its DistributedSampler, and no `join()`; or call "
                         "loss.backward() yourself, checkpoints work as before",
                )  # fmt: skip
            replica.reducer._rebuild_buckets()
            if replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                replica._sync_buffers()  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(replica.no_sync())
                replica.require_forward_param_sync = False
            self._exchanging = [replica for replica, on in zip(self._replicas, exchanging, strict=True) if on]
            yield
        for replica in self._exchanging:
            replica.require_forward_param_sync = True

    def exchange(self, loss: torch.Tensor) -> None:
        """Let the backward pass that follows, of this loss, exchange gradients, as DDP's forward would have."""
        for replica in self._exchanging:
            replica.reducer.prepare_for_forward()
            unused = replica.find_unused_parameters and not replica.static_graph
            replica.reducer.prepare_for_backward([loss] if unused else [])
