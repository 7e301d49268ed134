"""Build functions as people write them, good and bad; loaded by path in the tracing child."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, 100), torch.zeros(size, dtype=torch.long)


def plain():
    """A model that reads values while it is built, moves itself to the GPU and is compiled."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(100, 4000), nn.ReLU(), nn.Dropout(rates[-1]), nn.Linear(4000, 10)).cuda()
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.1, momentum=0.9)
    return torch.compile(model), batch(), optimizer, nn.CrossEntropyLoss()


class Flattened(nn.Module):
    """Learns the size of its last layer from a forward pass while it is built, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Linear(self.features(torch.zeros(1, 3, 16, 16)).flatten(1).shape[1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.features(x).flatten(1))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)


def flattened():
    return Flattened(), images()


def lazy():
    """The same with layers that learn their shape from the first batch."""
    features = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    return nn.Sequential(features, nn.Flatten(), nn.LazyLinear(10)), images()


def lazy_tried():
    """The same, tried once so that an optimizer can be made."""
    model, batch = lazy()
    model(batch[0])
    return model, batch, torch.optim.AdamW(model.parameters())


def large():
    """16 GiB of weights, none of which may be allocated."""
    return nn.Sequential(*[nn.Linear(32768, 32768, bias=False) for _ in range(4)]), (torch.zeros(1, 32768),)


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 1000)
        self.last = nn.Linear(1000, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.sum().item() > 1e9:
            hidden = hidden * 2
        return self.last(hidden)


def reads_values():
    return ReadsValues(), batch(4096)


def raises():
    raise ValueError("the width must be even")


def nonsense():
    return "a model"


def prompts():
    return input("which model? ")


def aborts():
    os.abort()


def leaves():
    sys.exit(4)


def never_ends():
    """Forks a child that would outlive it, and tells its pid."""
    pid = os.fork()
    if pid:
        with open(os.environ["BUOY_TEST_PID"], "w") as file:
            file.write(str(pid))
    time.sleep(600)


def hungry():
    return [torch.zeros(1 << 30) for _ in range(100)]


def wrong_shapes():
    return nn.Sequential(nn.Linear(50, 10)), batch()


def downloads():
    import urllib.request

    return urllib.request.urlopen("http://192.0.2.1/weights.pt")


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.ops.buoytest.twice(x))


def custom_operation():
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.library.custom_op("buoytest::twice", twice, mutates_args=())
    return Custom(), batch()


def two_devices():
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(batch[0] + torch.zeros(100)).sum()

    return nn.Linear(100, 10), batch(), torch.optim.SGD, loss


def with_closure():
    return nn.Linear(100, 10), batch(), torch.optim.LBFGS
