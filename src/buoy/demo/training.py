"""The demo's training, as everybody writes it; given a run folder, with buoy: three lines changed.

`python -m buoy.demo.training [RUN [SAMPLES]]`: a small convolutional network, small pictures, a batch that needs room.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import buoy

EPOCHS, BATCH = 4, 640


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    """As everybody writes it."""
    step = 0
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            _say(f"step {step} {loss.item()!r}")


def guarded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    folder: str,
    samples: int | None,
) -> None:
    """The same with buoy: the run, the batches and the backward pass are its own."""

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return cross_entropy(model(x), y)

    run = buoy.Run(folder, save=1, micro_batch=samples)
    run.track(model=model, optimizer=optimizer)
    _say(f"pid {os.getpid()}")
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(loader):
            loss = run.backward(batch, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            _say(f"step {run.step} {float(loss)!r}")


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """The model, its optimizer and the data, the same in every process."""
    torch.manual_seed(0)
    pictures = torch.randn(1280, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    labels = (pictures.mean((1, 2, 3)) * 30).long().clamp(0, 9)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=BATCH)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parts = make()
    if sys.argv[1:]:
        guarded(*parts, sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None)
    else:
        _say(f"before {_peak_mib()}")
        plain(*parts)
    digest = hashlib.sha256()
    for parameter in parts[0].parameters():
        digest.update(parameter.detach().numpy().tobytes())
    _say(f"weights {digest.hexdigest()[:16]}")
    _say(f"peak {_peak_mib()}")
