"""Weights that get a gradient and are not tracked: a loss with centres, heads in a list, a prompt of one's own."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy
from buoy.testing import every_allocation

N = 12


class Training:
    """A tracked model, and three kinds of weights that nobody told of."""

    def __init__(self, micro_batch: int | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 4, dtype=torch.float64)
        self.centres = nn.Linear(4, 4, dtype=torch.float64)
        self.heads = [nn.Linear(4, 3, dtype=torch.float64)]  # a plain list: nobody finds modules in it
        self.prompt = torch.ones(6, dtype=torch.float64, requires_grad=True)
        self.batch = torch.randn(N, 6, dtype=torch.float64), torch.arange(N) % 3
        self.run = buoy.Run(micro_batch=micro_batch)
        self.run.track(model=self.model)

    def mean(self, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = part
        return F.cross_entropy(self.heads[0](self.centres(self.model(x * self.prompt))), y)

    def pair(self, part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = part
        each = F.cross_entropy(self.heads[0](self.centres(self.model(x * self.prompt))), y, reduction="none")
        return (each * (y > 0)).sum(), (y > 0).sum()

    def gradients(self) -> list[torch.Tensor]:
        weights = [*self.model.parameters(), *self.centres.parameters(), *self.heads[0].parameters()]
        return [weight.grad for weight in [*weights, self.prompt] if weight.grad is not None]


@pytest.mark.parametrize("kind", ["mean", "pair"])
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_weights_that_nobody_tracks_have_the_gradient_of_the_plain_loop(
    kind: str, micro_batch: int | None
) -> None:
    plain, ours = Training(None), Training(micro_batch)
    for _ in range(2):  # and accumulate
        made = getattr(plain, kind)(plain.batch)
        (made if kind == "mean" else made[0] / made[1]).backward()
        ours.run.backward(ours.batch, getattr(ours, kind))
    for one, other in zip(ours.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_no_failed_try_stays_in_weights_that_nobody_tracks() -> None:
    """Also with a second loss function, which nothing was compared for."""

    def work(training: Training) -> None:
        training.run.backward(training.batch, training.mean)
        training.run.backward(training.batch, training.pair)

    done = Training(None)
    work(done)
    for failure in every_allocation(work, lambda: Training(None)):
        assert failure.error is None, failure.operation
        for one, other in zip(failure.subject.gradients(), done.gradients(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_what_a_loss_function_makes_itself_is_not_kept() -> None:
    """A gradient penalty's input requires a gradient, and goes with its batch."""
    training = Training(None)
    made: list[weakref.ref[torch.Tensor]] = []

    def penalty(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = part[0].clone().requires_grad_()
        made.append(weakref.ref(x))
        (slope,) = torch.autograd.grad(training.model(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    training.run.backward(training.batch, penalty)
    gc.collect()
    assert made and not any(each() is not None for each in made)
