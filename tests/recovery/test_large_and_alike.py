"""What hid from the comparison of whole and parts: few numbers in large tables, names that two models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from buoy.microbatch.errors import BadLoss, CannotSplit, TornStep
from buoy.torch.step.transaction import Transaction

N = 16


def guard(*modules: nn.Module, micro_batch: int | None = None) -> Transaction:
    made = Transaction(say=lambda words: None, event=lambda *a, **k: None, micro_batch=micro_batch)
    made.track(modules, [])
    return made


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_only_moves_rows_of_large_tables_is_compared_there(seed: int) -> None:
    """A sum of losses over users and items: nearly all of the gradient is zero."""
    torch.manual_seed(seed)
    users, items = nn.Embedding(200_000, 8), nn.Embedding(200_000, 8)
    batch = tuple(torch.randint(0, 200_000, (N,)) for _ in range(3))

    def loss(part: Any) -> torch.Tensor:
        user, liked, other = part
        return -F.logsigmoid((users(user) * (items(liked) - items(other))).sum(1)).sum()

    with pytest.raises(CannotSplit, match="a sum over samples, not a mean"):
        guard(users, items, micro_batch=4).backward(batch, loss)
    guard(users, items, micro_batch=4).backward(batch, loss, reduction="sum")
    cut = users.weight.grad.clone()  # type: ignore[union-attr]
    users.weight.grad = None
    loss(batch).backward()

    assert users.weight.grad is not None
    assert torch.allclose(cut, users.weight.grad, atol=1e-7)


@pytest.mark.parametrize("fill", [0.0, -1e9, torch.finfo(torch.float32).min])
def test_a_large_number_among_the_buffers_hides_no_other_gradient(fill: float) -> None:
    """A causal mask that nobody writes; the loss is a weighted mean, which is no mean over samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model.register_buffer("mask", torch.triu(torch.full((64, 64), fill), 1))
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    batch = x, y, torch.where(y > 0, 9.0, 1.0)

    def loss(part: Any) -> torch.Tensor:
        x, y, weight = part
        return (weight * (model(x) - y) ** 2).sum() / weight.sum()

    with pytest.raises(CannotSplit):
        guard(model, micro_batch=8).backward(batch, loss)


def _in_place(slow: torch.Tensor, fast: torch.Tensor) -> None:
    slow.lerp_(fast, 0.1)


def _by_data(slow: torch.Tensor, fast: torch.Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1  # as MoCo's own code does


@pytest.mark.parametrize("follow", [_in_place, _by_data], ids=["in place", "by .data"])
@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_teacher_of_the_same_names_moves_once_and_forbids_the_cut(
    follow: Callable[[torch.Tensor, torch.Tensor], None], teacher_first: bool
) -> None:
    """The loss does not even read it: only what is left behind tells."""
    batch = torch.randn(N, 6), torch.randn(N, 4)

    def build() -> tuple[nn.Module, nn.Module, Callable[[Any], torch.Tensor]]:
        torch.manual_seed(0)
        student, teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

        def loss(part: Any) -> torch.Tensor:
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    follow(slow, fast)
            return F.mse_loss(student(part[0]), part[1])

        return student, teacher, loss

    student, expected, loss = build()
    loss(batch).backward()
    student, teacher, loss = build()
    tracked = (teacher, student) if teacher_first else (student, teacher)
    guard(*tracked).backward(batch, loss)
    failed: list[bool] = []

    def fails_once(part: Any) -> torch.Tensor:
        made = loss(part)
        if not failed and len(part[0]) == N:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    again, kept, loss = build()
    tracked = (kept, again) if teacher_first else (again, kept)
    with pytest.raises(TornStep, match="it had changed weights"):  # nobody knew of it before its first step
        guard(*tracked).backward(batch, fails_once)

    assert torch.equal(expected.weight, teacher.weight)  # type: ignore[arg-type]
    assert failed
    with pytest.raises(CannotSplit, match="changes the weight weight"):
        guard(*tracked, micro_batch=5).backward(batch, loss)


class Following(nn.Module):
    """Keeps a moving mean that this loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
        return made  # type: ignore[no-any-return]


def test_a_buffer_is_seen_behind_one_of_the_same_name() -> None:
    student, teacher = Following(), Following().eval().requires_grad_(False)
    batch = torch.randn(N, 6)

    with pytest.raises(CannotSplit, match="mean changes with each forward pass"):
        guard(student, teacher, micro_batch=5).backward(
            batch, lambda x: F.mse_loss(student(x), teacher(x).detach())
        )


def test_a_weight_that_is_learned_is_no_number_of_samples() -> None:
    """Its own gradient would be left out, cut or not."""
    model, attention = nn.Linear(6, 4), nn.Linear(6, 1)
    batch = torch.randn(N, 6), torch.randint(0, 4, (N,))

    def loss(part: Any) -> Any:
        weight = attention(part[0])[:, 0].exp()
        return (weight * F.cross_entropy(model(part[0]), part[1], reduction="none")).sum(), weight.sum()

    with pytest.raises(BadLoss, match="depends on trained parameters"):
        guard(model, attention).backward(batch, loss)
    guard(model, attention).backward(batch, lambda part: (loss(part)[0], loss(part)[1].detach()))


def test_a_batch_without_any_gradient_proves_nothing_for_the_next() -> None:
    """Every margin is kept: nothing shows that such a batch may be split."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)

    def loss(part: Any) -> torch.Tensor:
        below = F.relu(part[1] - model(part[0])[:, 0]) * (part[1] > 0.5)
        return below.sum() / (below > 0).sum().clamp(min=1)

    run = guard(model, micro_batch=5)
    with pytest.raises(CannotSplit, match="zero, not finite or mostly rounding"):
        run.backward((torch.full((N, 1), 9.0), torch.full((N,), 0.2)), loss)
    x = torch.full((N, 1), 9.0)
    x[::3] = 0.3
    with pytest.raises(CannotSplit):
        run.backward((x, torch.full((N,), 0.9)), loss)
