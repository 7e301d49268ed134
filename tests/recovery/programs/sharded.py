"""Sharded models on the ranks of `ranks.py`: what `buoy.Run` says to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import buoy
from buoy.errors import BuoyError
from buoy.torch.step.transaction import Transaction

BATCH = torch.ones(4, 6)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def fsdp() -> nn.Module:
    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)


def fsdp_inside() -> nn.Module:
    return nn.Sequential(FullyShardedDataParallel(network(), device_id=torch.device("cpu")), nn.Linear(4, 2))


def fsdp2() -> nn.Module:
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def zero() -> nn.Module:
    return nn.parallel.DistributedDataParallel(network())


def in_words(work: Callable[[], Any]) -> str:
    try:
        work()
    except BuoyError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    return torch.optim.AdamW(model.parameters())


def trial(kind: str, build: Callable[[], nn.Module]) -> dict[str, str]:
    model = build()
    optimizer = optimizer_of(model, kind)
    run = buoy.Run()
    said = {
        "model": in_words(lambda: run.track(model=model)),
        "optimizer": in_words(lambda: run.track(optimizer=optimizer)),
    }
    transaction = Transaction(say=print, event=lambda *a, **k: None)

    def step() -> None:
        transaction.track([model], [optimizer])
        transaction.backward(BATCH, lambda part: model(part).square().mean())

    said["backward"] = in_words(step) if kind != "zero" else ""
    model(BATCH).square().mean().backward()  # the model is as it was: both ranks train on without buoy
    optimizer.step()
    run.finish()
    return said


KINDS = {"fsdp": fsdp, "fsdp inside": fsdp_inside, "fsdp2": fsdp2, "zero": zero}


def trials() -> dict[str, dict[str, str]]:
    return {kind: trial(kind, build) for kind, build in KINDS.items()}
