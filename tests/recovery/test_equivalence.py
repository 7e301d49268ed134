"""Micro-batches give the full batch's gradient, or buoy refuses: never a third thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from buoy.microbatch.errors import BadLoss, CannotSplit
from buoy.torch.step.transaction import Transaction
from tests.recovery.zoo import ZOO, N, Pair

DTYPES = {"double": torch.float64, "single": torch.float32}


def gradient(pair: Pair, batch: Any, micro_batch: int | None) -> torch.Tensor:
    """Without dropout and noise: those are random by design, and drawn in another order by parts."""
    for part in pair.model.modules():
        if "Dropout" in type(part).__name__ or type(part).__name__ == "Noise":
            part.eval()
        for name in ("dropout", "dropout1", "dropout2"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    transaction = Transaction(say=lambda text: None, event=lambda *a, **k: None, micro_batch=micro_batch)
    transaction.track([pair.model], [])
    pair.model.zero_grad()
    transaction.backward(batch, pair.loss, reduction=pair.reduction)
    return torch.cat([p.grad.flatten() for p in pair.model.parameters() if p.grad is not None]).double()


def build(name: str, dtype: torch.dtype) -> Pair:
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return ZOO[name]()
    finally:
        torch.set_default_dtype(before)


def reordered(batch: Any) -> Any:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    return tuple(part[order] for part in batch) if isinstance(batch, tuple) else batch[order]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ZOO)
def test_parts_give_the_gradient_of_the_whole_or_are_refused(name: str, precision: str) -> None:
    """In parts of 5, 4 and 3 of 12; in single precision against what two orders of the same samples differ by."""
    pair = build(name, DTYPES[precision])
    try:
        whole = gradient(pair, pair.batch, None)
        parts = [gradient(pair, pair.batch, size) for size in (5, 3, 1)]
    except CannotSplit as refusal:
        assert not pair.exact, f"refused without need: {refusal}"
        assert refusal.hint
        return

    assert pair.exact, "a batch was cut although its samples depend on each other"
    worst = max(float((part - whole).norm() / whole.norm()) for part in parts)
    if precision == "double":
        assert worst <= 1e-12
    else:
        rounding = max(
            float((gradient(pair, reordered(pair.batch), None) - whole).norm() / whole.norm()), 2**-23
        )
        assert worst <= 4 * rounding


def _transaction(model: torch.nn.Module) -> Transaction:
    transaction = Transaction(say=lambda text: None, event=lambda *a, **k: None, micro_batch=8)
    transaction.track([model], [])
    return transaction


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6, 0.0])
def test_a_model_at_its_goal_is_not_refused_for_rounding(distance: float) -> None:
    """What is left of the loss there is a difference of nearly equal numbers, in whole and parts another."""
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(16, 8)
        model = torch.nn.Linear(8, 1)
        with torch.no_grad():
            model.weight.copy_(torch.ones(1, 8) + distance * torch.randn(1, 8))
            model.bias.copy_(distance * torch.randn(1))

        _transaction(model).backward(
            (x, x.sum(1, keepdim=True)), lambda part, model=model: (model(part[0]) - part[1]).square().mean()
        )


def test_a_cut_of_the_persons_own_stays_allowed_at_the_goal() -> None:
    """Samples there are known only as the person cuts them: what was found before stands."""
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(16, 8)
        y = x.sum(1, keepdim=True)
        model = torch.nn.Linear(8, 1)
        transaction = _transaction(model)
        for weight in (0.5, 1.0, 1.0):
            with torch.no_grad():
                model.weight.fill_(weight)
                model.bias.fill_(1e-7)
            transaction.backward(
                {"all": (x, y)},
                lambda part, model=model: (model(part[0]) - part[1]).square().mean(),
                split=(16, lambda start, stop, x=x, y=y: (x[start:stop], y[start:stop])),
            )


def test_a_classifier_that_is_sure_is_not_refused_for_rounding() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        labels = torch.randint(0, 4, (16,))
        x = torch.nn.functional.one_hot(labels, 4).float() + 0.01 * torch.randn(16, 4)
        model = torch.nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.copy_(15 * torch.eye(4))

        _transaction(model).backward(
            (x, labels), lambda part, model=model: torch.nn.functional.cross_entropy(model(part[0]), part[1])
        )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out.sum() * float("nan"),
        lambda out: out,
        lambda out: out.sum().detach(),
        lambda out: None,
    ],
    ids=["NaN", "vector", "detached", "None"],
)
def test_a_bad_loss_is_called_so_and_not_a_batch_that_cannot_be_cut(wrong: Any) -> None:
    model = torch.nn.Linear(8, 1)

    with pytest.raises(BadLoss):
        _transaction(model).backward(torch.randn(16, 8), lambda part: wrong(model(part)))


def test_a_refusal_after_cut_steps_says_that_those_may_be_wrong() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    transaction = _transaction(model)

    def loss(part: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(part[0]), part[1], torch.tensor([1.0, 1.0, 20.0]))

    x = torch.randn(16, 8)
    transaction.backward((x, torch.tensor([0, 1] * 8)), loss)
    with pytest.raises(CannotSplit) as refusal:
        transaction.backward((x, torch.tensor([0, 1] * 7 + [0, 2])), loss)
    assert "that were split before it (1)" in str(refusal.value.hint)


@pytest.mark.parametrize("name", ZOO)
def test_the_loss_that_comes_back_is_that_of_the_whole_batch_and_nothing_is_said(name: str) -> None:
    pair = build(name, torch.float64)
    if not pair.exact:
        return
    whole, parts, said = losses(pair.model, pair.loss, pair.batch, pair.reduction)

    assert parts == pytest.approx(whole, rel=1e-9)
    assert not any("the returned loss" in line for line in said)


def test_a_loss_that_parts_do_not_add_up_to_is_told() -> None:
    model = torch.nn.Linear(1, 4, bias=False)
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))

    def distance(part: torch.Tensor) -> torch.Tensor:
        """From the middle of the batch: its gradient is a mean over samples, and it itself is not."""
        return (model.weight[:, 0] - part.mean(0)).square().sum()

    whole, parts, said = losses(model, distance, batch, "mean")

    assert parts != pytest.approx(whole, rel=1e-3)
    assert [line for line in said if "the returned loss differs" in line], said


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_in_half_precision_and_one_that_is_nearly_nothing_are_not_told(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = torch.nn.Linear(6, 1), torch.randn(6, 6)
    rewards = torch.randn(6)
    rewards = (rewards - rewards.mean()) / rewards.std()

    def policy(part: Any) -> torch.Tensor:
        """As at the first step of a round: the ratio is 1, and what it is multiplied with has the mean 0."""
        chances = model(part[0])[:, 0]
        return -((chances - chances.detach()).exp() * part[1]).mean()

    assert losses(model, policy, (x, rewards), "mean")[2] == []
    half = torch.nn.Linear(6, 4).bfloat16()
    batch = torch.randn(16, 6).bfloat16(), torch.randn(16, 4).bfloat16()
    assert losses(half, lambda part: (half(part[0]) - part[1]).square().sum(), batch, "sum")[2] == []


def losses(
    model: torch.nn.Module, loss_fn: Any, batch: Any, reduction: str
) -> tuple[float, float, list[str]]:
    """Whole and in parts, from the same weights; and what was said."""
    model.eval()
    found: list[float] = []
    said: list[str] = []
    for size in (None, 5):
        transaction = Transaction(say=said.append, event=lambda *a, **k: None, micro_batch=size)
        transaction.track([model], [])
        found.append(float(transaction.backward(batch, loss_fn, reduction=reduction)))
        model.zero_grad()
    return found[0], found[1], said
