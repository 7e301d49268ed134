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
    kind: str, wrap: Callable[[Any], Any] = lambda loss: loss, plain: bool = False, tracked: bool = False
) -> list[torch.Tensor]:
    trainer = Trainer()
    loss = wrap(getattr(trainer, f"of_{kind}"))
    run = buoy.Run()
    run.track(model=trainer.model)
    if tracked:
        run.track(teacher=trainer.teacher, criterion=trainer.criterion)
    source = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randn(N, 6, generator=source)
        loss(batch).backward() if plain else run.backward(batch, loss)
    return trainer.left()


KINDS = ["centre", "statistics", "follower", "python", "numpy", "torch"]
Wrap = Callable[[Any], Any]


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_tracks_is_that_of_the_plain_loop(kind: str) -> None:
    for one, other in zip(trained(kind, plain=True), trained(kind), strict=True):
        assert torch.equal(one, other)


def fails_in(number: int) -> Wrap:
    """The loss function, out of memory in its call of this number."""

    def wrap(loss: Any) -> Any:
        calls: list[int] = []

        def wrapped(x: torch.Tensor) -> torch.Tensor:
            made = loss(x)
            calls.append(len(x))
            if len(calls) == number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return made  # type: ignore[no-any-return]

        return wrapped

    return wrap


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_tracks_forbids_a_second_try_in_words(kind: str, number: int) -> None:
    """The failed try has moved it, and nobody can say how far."""
    with pytest.raises(CannotSplit) as caught:
        trained(kind, fails_in(number))
    assert "state between calls" in str(caught.value) or "is not tracked" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("centre", "Centred.centre changes with each call of the loss function, and is not tracked"),
        ("statistics", "BatchNorm1d.* changes with each call of the loss function, and is not tracked"),
        ("follower", "Linear.weight changes with each call of the loss function, and is not tracked"),
        ("python", "keeps state between calls"),
    ],
)
def test_what_nobody_tracks_forbids_the_split_in_words(kind: str, reason: str) -> None:
    trainer = Trainer()
    run = buoy.Run(micro_batch=5)
    run.track(model=trainer.model)

    with pytest.raises(CannotSplit, match=reason):
        run.backward(torch.randn(N, 6), getattr(trainer, f"of_{kind}"))


@pytest.mark.parametrize("kind", ["centre", "statistics"])
def test_what_is_tracked_is_restored(kind: str) -> None:
    """As the refusal's hint says: it may not be split, and a second try is that of the plain loop."""
    expected, found = trained(kind, plain=True), trained(kind, fails_in(1), tracked=True)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
