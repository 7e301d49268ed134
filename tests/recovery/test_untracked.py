"""What a loss function computes with and nobody tracks: other modules and random generators, as in the plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy
from buoy.microbatch.errors import CannotSplit

N = 16


class Centred(nn.Module):
    """DINO's loss: a buffer that follows the teacher's mean, and is read by the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, 4))

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        target = ((teacher - self.centre) / 0.04).softmax(1)
        self.centre = 0.9 * self.centre + 0.1 * teacher.mean(0, keepdim=True)
        return -(target * (student / 0.1).log_softmax(1)).sum(1).mean()


class Trainer:
    """An object of a person's own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 4)
        self.teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.criterion = Centred()
        self.twister, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator()

    def of_centre(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher[0](x)
        return self.criterion(self.model(x), target)  # type: ignore[no-any-return]

    def of_statistics(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), self.teacher(x))

    def of_follower(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.model.weight, 0.1)  # type: ignore[arg-type]
        return F.mse_loss(self.model(x), self.teacher[0](x))

    def of_python(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x * self.twister.random()).square().mean()  # type: ignore[no-any-return]

    def of_numpy(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x + torch.from_numpy(self.numpy.random(x.shape)).float()).square().mean()  # type: ignore[no-any-return]

    def of_torch(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x + torch.randn(x.shape, generator=self.torch)).square().mean()  # type: ignore[no-any-return]

    def left(self) -> list[torch.Tensor]:
        """Of all that a step may leave behind."""
        assert self.model.weight.grad is not None
        kept = [self.model.weight.grad, self.criterion.centre]
        return [*kept, *self.teacher.state_dict().values()]


def trained(
    kind: str, wrap: Callable[[Any], Any] = lambda loss: loss, plain: bool = False
) -> list[torch.Tensor]:
    trainer = Trainer()
    loss = wrap(getattr(trainer, f"of_{kind}"))
    run = buoy.Run()
    run.track(model=trainer.model)
    source = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randn(N, 6, generator=source)
        loss(batch).backward() if plain else run.backward(batch, loss)
    return trainer.left()


@pytest.mark.parametrize("kind", ["centre", "statistics", "follower", "python", "numpy", "torch"])
def test_what_nobody_tracks_is_that_of_the_plain_loop(kind: str) -> None:
    """Also where a try runs out of memory after it has moved something."""
    failed = []

    def fails_in_the_third(loss: Any) -> Any:
        calls = []

        def wrapped(x: torch.Tensor) -> torch.Tensor:
            made = loss(x)
            calls.append(len(x))
            if calls.count(N) == 3 and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return made  # type: ignore[no-any-return]

        return wrapped

    expected, found = trained(kind, plain=True), trained(kind)
    # Two parts of one stream are the whole; what may be cut otherwise has other draws.
    after = trained(kind, fails_in_the_third) if kind not in ("numpy", "torch") else found

    for name, one, other, again in zip(range(99), expected, found, after, strict=False):
        assert torch.equal(one, other), name
        assert torch.equal(one, again), name


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("centre", "centre changes with each forward pass"),
        ("statistics", "is BatchNorm"),
        ("follower", "changes the weight 0.weight"),
        ("python", "`self.twister` is a random generator of your own"),
    ],
)
def test_what_nobody_tracks_forbids_the_cut_in_words(kind: str, reason: str) -> None:
    trainer = Trainer()
    run = buoy.Run(micro_batch=5)
    run.track(model=trainer.model)

    with pytest.raises(CannotSplit, match=reason):
        run.backward(torch.randn(N, 6), getattr(trainer, f"of_{kind}"))
