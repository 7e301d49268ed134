"""The child of `bench resume` that trains with PyTorch: up to a batch, or as far as its next one."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import buoy


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 480_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index % 7))


def main() -> None:
    folder, stop_at, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = buoy.Run(folder, save="24h")
    run.track(model=model, optimizer=optimizer)
    loader = DataLoader(Points(), batch_size=8, shuffle=True, num_workers=workers)
    for _ in run.epochs(1):
        for x in run.batches(loader):
            if stop_at == "None":
                print(run.batch - 1, time.time() - float(os.environ["BENCH_BORN"]), flush=True)
                os._exit(0)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.batch == int(stop_at):
                run.save()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
