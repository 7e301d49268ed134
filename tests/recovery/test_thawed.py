"""Layers that are thawed on the way get the gradient of the whole batch, like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy
from buoy.testing import byte_budget

X, Y = torch.randn(64, 6).double(), torch.arange(64) % 4


class Frozen:
    """A model whose first layer does not learn at first, under a run that has done a step."""

    def __init__(self, pair: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.pair = pair
        self.model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 4)).double()
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model[2].parameters(), lr=0.1)
        self.run = buoy.Run(**options)
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.backward()
        self.model.zero_grad()

    def backward(self) -> None:
        self.run.backward((X, Y), self.loss)

    def loss(self, part: Any) -> Any:
        made = F.cross_entropy(self.model(part[0]), part[1], reduction="sum")
        return (made, len(part[1])) if self.pair else made / len(part[1])

    def gradients(self) -> list[torch.Tensor | None]:
        made = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad()
        return made

    def expected(self) -> list[torch.Tensor | None]:
        F.cross_entropy(self.model(X), Y).backward()
        return self.gradients()


def same(made: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(
        a is not None and b is not None and torch.allclose(a, b, rtol=1e-11, atol=1e-14)
        for a, b in zip(made, expected, strict=True)
    )


@pytest.mark.parametrize("pair", [False, True], ids=["mean", "pair"])
def test_a_layer_that_is_thawed_later_has_the_gradient_of_the_whole_batch(pair: bool) -> None:
    """The 1st, 2nd and 4th cut step after the thaw are compared first: nothing of that may be left in `.grad`."""
    bench = Frozen(pair, micro_batch=30)
    bench.model[0].requires_grad_(True)
    for _ in range(4):
        bench.backward()
        assert same(bench.gradients(), bench.expected())


@pytest.mark.parametrize("pair", [False, True], ids=["mean", "pair"])
def test_a_failed_try_leaves_nothing_in_a_layer_that_was_thawed(
    pair: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = Frozen(pair)
    bench.model[0].requires_grad_(True)
    with byte_budget("150KiB"):
        bench.backward()

    assert "out of memory with 64 samples" in capfd.readouterr().err
    assert same(bench.gradients(), bench.expected())


def test_a_loss_function_that_thaws_is_compared_with_what_it_trains() -> None:
    """As a GAN's two losses do with the discriminator."""
    bench = Frozen(micro_batch=30)
    plain = bench.loss

    def thaws(part: Any) -> Any:
        bench.model[0].requires_grad_(True)
        return plain(part)

    bench.run.backward((X, Y), thaws)

    assert same(bench.gradients(), bench.expected())


def test_parameters_that_an_optimizer_gets_later_are_guarded_too() -> None:
    bench = Frozen(micro_batch=30)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    bench.optimizer.add_param_group({"params": [scale]})

    bench.run.backward((X, Y), lambda part: F.cross_entropy(bench.model(part[0]) * scale, part[1]))

    made, scale.grad = scale.grad, None
    F.cross_entropy(bench.model(X) * scale, Y).backward()
    assert same([made], [scale.grad])


def test_a_frozen_layer_keeps_the_gradient_it_has() -> None:
    bench = Frozen(micro_batch=30)
    bench.model[0].weight.grad = held = torch.ones_like(bench.model[0].weight)
    bench.backward()

    assert bench.model[0].weight.grad is held
    assert bool((held == 1).all())
