"""Ranks under torchrun; one runs out of memory, or has a bug, while the others do not."""

from __future__ import annotations

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from buoy.errors import BuoyError
from buoy.torch.step.transaction import Transaction
from tests.recovery.programs.sharded import trials

FOLDER, *KINDS = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
RANK = dist.get_rank()


def build(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 4))


def train(kind: str) -> dict[str, object]:
    """Six steps, beside a process alone with both halves of the batch."""
    norm = kind == "batchnorm"
    model, alone = build(norm), build(norm)
    ddp = DistributedDataParallel(
        model, find_unused_parameters=kind == "unused", static_graph=kind == "static"
    )
    optimizer, other = torch.optim.SGD(ddp.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    said: list[str] = []
    transaction = Transaction(
        say=said.append,
        event=lambda *a, **k: None,
        inexact=("batchnorm",) if norm else (),
        micro_batch=3 if kind == "exchanging-cut" else None,
    )
    answer: dict[str, object] = {}
    try:
        transaction.track([model if kind == "inner" else ddp], [optimizer])
        if kind == "join":
            with ddp.join():
                transaction.backward(torch.randn(8, 6), lambda part: ddp(part).square().mean())
        for step in range(6):
            both = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))

            def loss(part: torch.Tensor, step: int = step) -> object:
                rows = ddp(part).square()
                if kind.startswith("exchanging"):  # a loss of all ranks, for a log
                    seen = rows.detach().mean()
                    dist.all_reduce(seen)
                    return rows.mean()
                if RANK == 1 and step in (0, 3) and len(part) > (4 if step == 0 else 2):
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                if RANK == 1 and step == 4 and kind == "bug":
                    raise ValueError("label out of range")
                if kind == "ignored":
                    counts = part[:, 0] != 0
                    return rows[counts].sum(), rows[counts].numel()
                return rows.mean()

            if RANK == 1 and step == 2 and kind == "empty":
                both = both[:, :0]
            if kind == "ignored":
                both[:, :4, 0] = 0  # the whole first part
            if kind == "accumulation":  # of one's own, the first half without an exchange
                with ddp.no_sync():
                    transaction.backward(both[RANK][:4], loss)
                transaction.backward(both[RANK][4:], loss)
                for parameter in ddp.parameters():
                    parameter.grad /= 2  # type: ignore[operator]
            else:
                # Of ranks with other numbers of samples one compares fewer parts.
                mine = both[RANK][: 5 if RANK == 1 and kind.startswith("exchanging") else 8]
                transaction.backward(mine, loss)
            optimizer.step()
            optimizer.zero_grad()
            rows = both[:, 4:] if kind == "ignored" else both
            alone(rows.reshape(-1, 6)).square().mean().backward()
            other.step()
            other.zero_grad()
    except (BuoyError, ValueError) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    reference = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    answer |= {
        "steps": transaction.steps,
        "weights": weights.tolist(),
        "off": float((weights - reference).abs().max()),
        "said": said,
        "sizes": [(entry["step"], entry.get("samples")) for entry in transaction.sizes],
    }
    return answer


for kind in KINDS:
    with open(f"{FOLDER}/{kind}-{RANK}.json", "w") as file:
        json.dump(trials() if kind == "sharded" else train(kind), file)
dist.barrier()  # gloo aborts a rank whose peer has left while it still listens
# All is written. Taking gloo's threads down aborts one rank in some thirty on a busy machine ("terminate called without
# an active exception"), which is not what is tested here.
os._exit(0)
