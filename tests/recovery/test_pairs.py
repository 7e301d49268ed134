"""What a loss function returns beside the loss is its weight: an accuracy there, or a mean, is told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from buoy.microbatch.errors import BadLoss
from buoy.torch.step.gradient import Accumulation
from buoy.torch.step.transaction import Transaction

Pair = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]


def train(pair: Pair, ignored: int = 0) -> tuple[list[str], Transaction]:
    torch.manual_seed(1)
    model = nn.Linear(6, 4)
    said: list[str] = []
    transaction = Transaction(say=said.append, event=lambda *a, **k: None)
    transaction.track([model], [torch.optim.SGD(model.parameters(), 0.1)])
    labels = torch.randint(0, 4, (12,))
    labels[:ignored] = -100
    for _ in range(2):
        transaction.backward((torch.randn(12, 6), labels), lambda part: pair(model(part[0]), part[1]))
    return said, transaction


def accuracy(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (made.argmax(1) == labels).float().mean()


@pytest.mark.parametrize(
    "pair",
    [
        lambda made, labels: (F.cross_entropy(made, labels), accuracy(made, labels)),
        lambda made, labels: (F.cross_entropy(made, labels), len(labels)),
        lambda made, labels: (F.cross_entropy(made, labels), (labels != -100).sum()),
        lambda made, labels: (F.cross_entropy(made, labels, reduction="sum"), accuracy(made, labels)),
    ],
    ids=["accuracy", "mean and samples", "mean and tokens", "sum and accuracy"],
)
def test_what_is_no_sum_and_its_weight_is_told_before_the_first_step(pair: Pair) -> None:
    with pytest.raises(BadLoss, match="is not a sum and its weight") as told:
        train(pair)
    assert "return only the loss" in str(told.value)


@pytest.mark.parametrize(
    "pair",
    [
        lambda made, labels: (F.cross_entropy(made, labels, reduction="sum"), (labels != -100).sum()),
        lambda made, labels: (
            F.cross_entropy(made, labels, reduction="sum"),
            (labels != -100).sum().clamp(min=1),
        ),
        lambda made, labels: (F.cross_entropy(made, labels, reduction="sum"), 12),
        lambda made, labels: (F.cross_entropy(made, labels), 1),
        lambda made, labels: (0.0 * made.sum(), len(labels)),
    ],
    ids=["tokens", "at least one", "constant", "mean alone", "nothing"],
)
@pytest.mark.parametrize("ignored", [0, 3])
def test_what_may_be_one_is_trained_as_ever(pair: Pair, ignored: int) -> None:
    said, transaction = train(pair, ignored)
    assert transaction.steps == 2
    assert not said


def test_a_gradient_counts_once_where_memory_runs_out_for_the_quotient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of the whole batch is divided last of all: the gradient is there already, and is given up."""
    model = nn.Linear(6, 4)
    transaction = Transaction(say=lambda text: None, event=lambda *a, **k: None)
    transaction.track([model], [torch.optim.SGD(model.parameters(), 0.1)])
    batch = torch.randn(12, 6), torch.randint(0, 4, (12,))

    def step() -> torch.Tensor:
        model.zero_grad()
        transaction.backward(
            batch, lambda part: (F.cross_entropy(model(part[0]), part[1], reduction="sum"), len(part[0]))
        )
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    undisturbed, quotient, calls = step(), Accumulation.loss, 0

    def fails_once(sums: Accumulation) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 bytes")
        return quotient(sums)

    monkeypatch.setattr(Accumulation, "loss", fails_once)
    torch.testing.assert_close(step(), undisturbed)
    assert transaction.retries == 1
