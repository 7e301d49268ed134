"""Trains on batches that cannot be computed in parts: `plain` or `guarded`, and what ties their samples together."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Batch], torch.Tensor]

WIDTH = 512
KIND, TIE = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)


def deep(*first: nn.Module) -> nn.Module:
    """Eight results of the width are kept for the backward pass: 16 KiB of each row."""
    kept = [layer for _ in range(4) for layer in (nn.Sigmoid(), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, WIDTH), *first, *kept, nn.Linear(WIDTH, 1))


def batch_norm() -> tuple[nn.Module, Batch, Loss]:
    """Statistics of the whole batch."""
    model = deep(nn.BatchNorm1d(WIDTH))
    return model, (torch.randn(24_000, 4), torch.randn(24_000, 1)), lambda b: F.mse_loss(model(b[0]), b[1])


def tokens() -> tuple[nn.Module, Batch, Loss]:
    """A mean over the tokens that are not padding: samples have different numbers of them."""
    model = deep()
    wanted = torch.randn(1000, 24, 1) * (torch.rand(1000, 24, 1) < torch.rand(1000, 1, 1))

    def loss(batch: Batch) -> torch.Tensor:
        counted = batch[1] != 0
        return ((model(batch[0]) - batch[1]).square() * counted).sum() / counted.sum()

    return model, (torch.randn(1000, 24, 4), wanted), loss


def pairs() -> tuple[nn.Module, Batch, Loss]:
    """Every sample is compared with every other: three matrices of 5000 x 5000, 95 MiB each."""
    model = nn.Linear(4, 32)

    def loss(batch: Batch) -> torch.Tensor:
        alike = model(batch[0]) @ batch[1].T
        return F.cross_entropy(alike.sigmoid(), torch.arange(len(alike)))

    return model, (torch.randn(5000, 4), torch.randn(5000, 32)), loss


model, batch, loss = {"batch_norm": batch_norm, "tokens": tokens, "pairs": pairs}[TIE]()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
steps = range(3)
if KIND == "plain":
    for _ in steps:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)
    for _ in steps:
        print("a step begins", flush=True)
        run.backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
print("done")
