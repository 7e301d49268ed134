"""A batch that was computed with gradients itself: a generator's images, an encoder's features."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

import buoy
from buoy.microbatch.errors import CannotSplit, OutOfMemory
from buoy.torch.step.transaction import Transaction

N = 16


def play(guarded: bool) -> list[torch.Tensor]:
    """As the official DCGAN does: the images of one forward pass train both."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    makes, judges = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
    run = buoy.Run()
    run.track(generator=generator, judge=judge, makes=makes, judges=judges)

    def backward(images: torch.Tensor, label: float) -> None:
        batch = images, torch.full((N,), label)

        def loss(part: Any) -> torch.Tensor:
            return F.binary_cross_entropy_with_logits(judge(part[0]).view(-1), part[1])

        run.backward(batch, loss) if guarded else loss(batch).backward()

    for _ in range(3):
        judge.zero_grad()
        backward(torch.randn(N, 6), 1.0)
        fake = generator(torch.randn(N, 4))
        backward(fake.detach(), 0.0)
        judges.step()
        generator.zero_grad()
        backward(fake, 1.0)
        makes.step()
    return [value.clone() for model in (generator, judge) for value in model.state_dict().values()]


def test_a_generator_and_its_judge_train_as_in_the_plain_loop() -> None:
    assert all(torch.equal(one, other) for one, other in zip(play(False), play(True), strict=True))


def pair() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(4, 6).double(), nn.Linear(6, 1).double()


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_cut_with_the_gradient_of_the_whole_on_both_sides(weighted: bool) -> None:
    made, judge = pair()
    plain, judged = copy.deepcopy(made), copy.deepcopy(judge)
    noise, weights = torch.randn(N, 4).double(), torch.rand(N).double()
    run = buoy.Run(micro_batch=5)
    run.track(made=made, judge=judge)

    def loss(part: Any, by: nn.Linear = judge) -> Any:
        each = F.softplus(-by(part[0]))[:, 0]
        return ((each * part[1]).sum(), part[1].sum()) if weighted else each.mean()

    for _ in range(2):  # accumulated
        run.backward((made(noise), weights), loss)
        whole = loss((plain(noise), weights), judged)
        (whole[0] / whole[1] if weighted else whole).backward()

    for one, other in ((made, plain), (judge, judged)):
        assert one.weight.grad is not None
        assert other.weight.grad is not None
        assert torch.allclose(one.weight.grad, other.weight.grad, rtol=1e-12, atol=1e-15)


def test_what_arrives_at_the_batch_is_compared_too() -> None:
    """The judge is frozen: only there it shows that the samples depend on each other."""
    made, judge = pair()
    judge.requires_grad_(False)
    run = buoy.Run(micro_batch=5)
    run.track(made=made)

    with pytest.raises(CannotSplit, match="depend on each other"):
        run.backward(made(torch.randn(N, 4).double()), lambda x: F.softplus(judge(x - x.mean(0))).mean())


def test_derivatives_by_the_batch_can_be_cut() -> None:
    """A physics-informed loss: the points require gradients before the step."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(model)
    points = torch.rand(N, 2).double().requires_grad_(True)
    same = points.detach().clone().requires_grad_(True)
    run = buoy.Run(micro_batch=5)
    run.track(model=model)

    def loss(x: torch.Tensor, by: nn.Module = model) -> torch.Tensor:
        return torch.autograd.grad(by(x).sum(), x, create_graph=True)[0].square().mean()

    run.backward(points, loss)
    loss(same, plain).backward()

    assert points.grad is not None
    assert same.grad is not None
    assert torch.allclose(points.grad, same.grad, rtol=1e-12, atol=1e-15)


IMAGES = torch.empty(0)


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_loss_that_asks_for_derivatives_by_its_input_can_be_cut(micro_batch: int | None) -> None:
    """R1's penalty, as it is written everywhere: the input itself is told to require a gradient."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)).double()
    twin, images = copy.deepcopy(judge), torch.randn(N, 6).double()

    def penalised(model: nn.Module, real: torch.Tensor) -> torch.Tensor:
        real.requires_grad_(True)
        made = model(real)
        (slope,) = torch.autograd.grad(made.sum(), real, create_graph=True)
        return F.softplus(-made).mean() + slope.square().sum(1).mean()

    said: list[str] = []
    transaction = Transaction(say=said.append, event=lambda *a, **k: None, micro_batch=micro_batch)
    transaction.track([judge], [torch.optim.SGD(judge.parameters(), 0.1)])
    for batch in (images.clone(), images.clone(), images[:2].clone()):
        transaction.backward(batch, lambda part: penalised(judge, part))
        penalised(twin, batch.detach().clone()).backward()

    for one, other in zip(judge.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert not said


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_with_a_cut_of_ones_own_it_trains_whole_and_is_refused_in_words(micro_batch: int | None) -> None:
    made, judge = pair()
    run = buoy.Run(micro_batch=micro_batch)
    run.track(made=made, judge=judge)
    images = made(torch.randn(N, 4).double())

    def backward() -> None:
        run.backward(
            images,
            lambda part: judge(part).square().mean(),
            split=(N, lambda start, stop: images[start:stop]),
        )

    if micro_batch is None:
        backward()
        assert made.weight.grad is not None
    else:
        with pytest.raises(CannotSplit, match="computed with gradients before"):
            backward()


def test_a_global_of_the_script_is_known_by_its_name() -> None:
    global IMAGES
    made, judge = pair()
    run = buoy.Run()
    run.track(made=made, judge=judge)
    IMAGES = made(torch.randn(N, 4).double())

    run.backward(torch.arange(N), lambda part: judge(IMAGES[part]).square().mean())

    assert made.weight.grad is not None


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_what_the_loss_function_reads_from_before_trains_whole_and_is_refused_in_words() -> None:
    made, judge = pair()
    plain, judged = copy.deepcopy(made), copy.deepcopy(judge)
    noise, rows = torch.randn(N, 4).double(), torch.arange(N)
    whole = buoy.Run()
    whole.track(made=made, judge=judge)

    images = made(noise)
    whole.backward(rows, lambda part: judge(images[part]).square().mean())
    judged(plain(noise)).square().mean().backward()

    assert torch.equal(made.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
    for micro_batch in (5, None):
        run, failed = buoy.Run(micro_batch=micro_batch), []
        run.track(made=made, judge=judge)
        images = made(noise)

        def full(gradient: torch.Tensor, failed: list[bool] = failed, micro_batch: Any = micro_batch) -> None:
            if micro_batch is None and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        made.weight.register_hook(full)
        with pytest.raises(CannotSplit, match="computed with gradients before it"):
            run.backward(rows, lambda part: judge(images[part]).square().mean())  # noqa: B023


def test_out_of_memory_before_the_batch_is_told_and_leaves_nothing() -> None:
    made, judge = pair()
    run = buoy.Run()
    run.track(made=made, judge=judge)

    with pytest.raises(OutOfMemory, match="the code that computed the batch"):
        run.backward(Full.apply(made(torch.randn(N, 4).double())), lambda x: judge(x).square().mean())
    assert made.weight.grad is None
    assert judge.weight.grad is None


def test_two_backward_passes_in_one_block_of_cached_weights_add_up() -> None:
    """Whole or split, each computes the weights again: a split step must not train with fresher ones than a whole."""

    class Squared(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * weight

    model = nn.Linear(5, 3, dtype=torch.float64)
    parametrize.register_parametrization(model, "weight", Squared())
    run = buoy.Run()
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(8, 5, dtype=torch.float64)
    run.backward(batch, lambda part: model(part).square().mean())
    once = [parameter.grad.clone() for parameter in model.parameters()]
    run.backward(batch, lambda part: model(part).square().mean())
    model.zero_grad()

    with parametrize.cached():
        for _ in range(2):
            run.backward(batch, lambda part: model(part).square().mean())

    for parameter, each in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * each, rtol=1e-12, atol=0)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_weights_that_are_cached_for_a_step_can_be_gone_through_again(micro_batch: int | None) -> None:
    """`parametrize.cached()` keeps a computed weight with its graph, which a comparison or a part has used up."""

    class Gated(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * weight.sigmoid()

    def trained(is_plain: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(5, 3, dtype=torch.float64)
        parametrize.register_parametrization(model, "weight", Gated())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = buoy.Run(micro_batch=micro_batch)
        run.track(model=model, optimizer=optimizer)
        for _ in range(3):
            batch = torch.randn(8, 5, dtype=torch.float64)
            with parametrize.cached():
                if is_plain:
                    model(batch).square().mean().backward()
                else:
                    run.backward(batch, lambda part: model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    for one, other in zip(trained(is_plain=False), trained(is_plain=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
