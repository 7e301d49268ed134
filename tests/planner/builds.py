"""Build functions and a script's pieces for the planner's tests; loaded by path in the tracing child."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.relu(self.wide(x)))


def samples(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, width, device="meta"), torch.zeros(count, dtype=torch.long, device="meta")


def activations():
    """Owned by activations: too much for a T4 in one piece."""
    return nn.Sequential(*[Block(1024) for _ in range(4)]), samples(200_000, 1024)


def parameters():
    """Owned by weights and optimizer: no micro-batch helps."""
    return nn.Sequential(*[Block(4096) for _ in range(8)]), samples(4, 4096)


def normalised():
    """With BatchNorm, for which smaller pieces are another training."""
    return nn.Sequential(nn.Linear(1024, 8192), nn.BatchNorm1d(8192), nn.Linear(8192, 10)), samples(
        200_000, 1024
    )


def nonsense():
    return 7


def endless():
    import time

    time.sleep(600)
