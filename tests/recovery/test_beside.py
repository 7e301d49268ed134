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


@pytest.mark.slow
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


def test_a_tensor_that_lives_for_one_step_is_not_kept() -> None:
    model, run = tracked()
    alive = []

    def step() -> None:
        x = torch.randn(8, 3, requires_grad=True)
        alive.append(weakref.ref(x))
        run.backward(torch.arange(8), lambda rows: model(x[rows]).square().mean())

    for _ in range(3):
        step()
    gc.collect()

    assert [known() for known in alive[:2]] == [None, None]


def test_a_loss_function_with_an_object_that_cannot_be_looked_into_is_computed() -> None:
    model, run = tracked()
    gone = weakref.proxy(torch.nn.Linear(1, 1))

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        if len(part) > 100:
            gone.log()
        return model(part.clone().requires_grad_()).square().mean()

    assert float(run.backward(torch.randn(8, 3), loss_fn)) > 0


def tracked() -> tuple[torch.nn.Module, buoy.Run]:
    model = torch.nn.Linear(3, 1)
    run = buoy.Run()
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return model, run
