"""Two ranks of one training (gloo), forked from a process that has torch loaded: whole, killed, stopped, resumed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import buoy
from tests.guards.lives import read
from tests.training.trainings import Augmented, Stage
from tests.training.warm import warm_up

Signals = dict[int, tuple[int, int]]
"""Step -> (rank, signal) that this rank sends itself there."""


def train(rank: int, stage: Stage, signals: Signals) -> None:
    torch.manual_seed(1 + rank)
    data = Augmented()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 3))
    )
    torch.manual_seed(1 + rank)  # dropout differs between the ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = buoy.Run(stage.folder, save=3, inexact=("batchnorm",))
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in run.batches(loader):
            # Once in a run, and on one rank, memory is short: both go on with smaller parts, also after a kill.
            short = rank == 1 and run.step == 3 and not os.path.exists(f"{stage.folder}.short")

            def loss_of(part: tuple[torch.Tensor, torch.Tensor], short: bool = short) -> torch.Tensor:
                if short and len(part[0]) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return functional.cross_entropy(model(part[0]), part[1])

            optimizer.zero_grad()
            loss = run.backward((x, y), loss_of)
            if short:
                open(f"{stage.folder}.short", "w").close()
            optimizer.step()
            stage.step(run.step, loss.item(), x)
            whom, number = signals.get(run.step, (None, 0))
            if whom == rank:
                os.kill(os.getpid(), number)
    stage.end(model.module, optimizer)
    run.finish()


def attempt(folder: str, count: int, signals: Signals) -> list[int]:
    """One life of all ranks; their wait statuses."""
    meeting = f"{folder}.{time.monotonic_ns()}"
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            os.dup2(os.open(f"{folder}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
            train(rank, Stage(folder, f"{folder}.{rank}.log", None, 0), signals)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    first, status = os.wait()
    statuses = {first: status}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        for pid in pids:  # what torchrun does when a rank is lost
            if pid != first:
                os.kill(pid, signal.SIGKILL)
    while len(statuses) < count:
        pid, status = os.wait()
        statuses[pid] = status
    return [statuses[pid] for pid in pids]


if __name__ == "__main__":
    warm_up()
    home = sys.argv[1]
    whole, cut = os.path.join(home, "whole"), os.path.join(home, "cut")
    result: dict[str, object] = {"whole": attempt(whole, 2, {})}
    result["killed"] = attempt(cut, 2, {5: (1, signal.SIGKILL)})
    result["told one rank to stop"] = attempt(cut, 2, {7: (1, signal.SIGTERM)})
    result["alone"] = attempt(cut, 1, {})
    result["resumed"] = attempt(cut, 2, {})
    for rank in (0, 1):
        expected, got = read(f"{whole}.{rank}.log")[0], read(f"{cut}.{rank}.log")
        result[f"rank {rank} differs"] = [
            step for step in expected if got[0].get(step) != expected[step]
        ] + got[1]
        result[f"rank {rank} steps"] = len(expected)
    with open(f"{cut}.stderr", encoding="utf-8") as file:
        result["stderr"] = file.read()
    print(json.dumps(result))
