"""What both trainings of the demo learn: small pictures, a small convolutional network, a batch that needs room."""

from __future__ import annotations

import hashlib
import resource
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 4, 640


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


def fingerprint(model: nn.Module) -> str:
    """Of every bit of the weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def peak_mib() -> int:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
