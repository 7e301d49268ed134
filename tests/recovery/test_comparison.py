"""The comparison of whole and parts leaves no trace, looks at both sides of a coin, and at every new kind of step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import buoy
from buoy.microbatch.errors import BadLoss, CannotSplit

Loss = Callable[[Any], Any]


def a_run(model: nn.Module, **options: Any) -> buoy.Run:
    run = buoy.Run(**options)
    run.track(model=model)
    return run


def xy(labels: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=source), torch.arange(16) % 4 if labels is None else labels


class Teaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def loss(self, part: Any) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return F.mse_loss(self.student(part[0]), self.teacher(part[0]))


def test_a_teacher_that_follows_in_the_loss_function_moves_once_and_forbids_the_cut() -> None:
    plain, guarded, cut = Teaching(), Teaching(), Teaching()
    for other in (guarded, cut):
        other.load_state_dict(plain.state_dict())
    plain.loss(xy()).backward()

    a_run(guarded).backward(xy(), guarded.loss)
    with pytest.raises(CannotSplit, match=r"changes the weight teacher\.weight"):
        a_run(cut, micro_batch=5).backward(xy(), cut.loss)

    assert torch.equal(plain.teacher.weight, guarded.teacher.weight)
    assert torch.equal(plain.student.weight.grad, guarded.student.weight.grad)  # type: ignore[arg-type]
    assert not torch.equal(plain.teacher.weight, cut.teacher.weight), "a refused step has moved it"


def test_a_teacher_is_put_back_when_memory_runs_out() -> None:
    plain, guarded = Teaching(), Teaching()
    guarded.load_state_dict(plain.state_dict())
    run, failed = a_run(guarded), []
    run.backward(xy(), guarded.loss)

    def fails_once(part: Any) -> torch.Tensor:
        made = guarded.loss(part)
        if not failed and len(part[0]) == 16:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    run.backward(xy(), fails_once)

    for _ in range(2):
        plain.loss(xy())
    assert failed
    assert torch.equal(plain.teacher.weight, guarded.teacher.weight)


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
def test_weights_that_a_hook_moves_inside_backward_move_once(by_hand: bool) -> None:
    found = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model, steps = nn.Linear(6, 4), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def hook(parameter: Any, model: Any = model, steps: Any = steps, optimizer: Any = optimizer) -> None:
            steps.append(parameter)
            if by_hand:
                parameter.data.sub_(parameter.grad, alpha=0.1)
            elif parameter is model.weight:
                optimizer.step()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

        def loss(part: Any, model: Any = model) -> torch.Tensor:
            return F.cross_entropy(model(part[0]), part[1])

        if guarded:
            with pytest.raises(CannotSplit, match="inside the backward pass"):
                a_run(model, micro_batch=5).backward(xy(), loss)
            a_run(model).backward(xy(), loss)
        else:
            loss(xy()).backward()
        found.append(model.weight.detach().clone())

    assert torch.equal(*found)


def test_a_tracked_optimizer_that_a_hook_steps_is_refused_in_words() -> None:
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)

    with pytest.raises(BadLoss, match="a gradient hook steps the optimizer"):
        run.backward(xy(), lambda part: F.cross_entropy(model(part[0]), part[1]))


COINS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1) < 0.5,
    "torch, otherwise": lambda: torch.rand(()) > 0.5,
    "torch, rarely": lambda: torch.rand(()).item() < 0.1,
    "torch, integers": lambda: torch.randint(0, 2, ()).item() == 1,
}


@pytest.mark.parametrize("name", COINS)
def test_both_sides_of_a_coin_are_looked_at(name: str) -> None:
    model = nn.Linear(6, 4)

    def loss(part: Any) -> torch.Tensor:
        x, y = part
        order = torch.randperm(len(x)) if COINS[name]() else slice(None)
        return F.cross_entropy(model(0.7 * x + 0.3 * x[order]), y)

    with pytest.raises(CannotSplit, match="samples depend on each other"):
        a_run(model, micro_batch=5).backward(xy(), loss)


DRAWS: dict[str, Callable[[int], torch.Tensor]] = {
    "randint": lambda n: torch.randint(0, 20, (n,)),
    "randint_like": lambda n: torch.randint_like(torch.zeros(n, dtype=torch.long), 20),
    "random_": lambda n: torch.empty(n, dtype=torch.long).random_(20),
    "multinomial": lambda n: torch.multinomial(torch.ones(20), n, replacement=True),
    "rand": lambda n: (torch.rand(n) * 20).long(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_for_each_sample_forbids_no_cut(name: str) -> None:
    """As the timesteps of a diffusion model."""
    times, head = nn.Embedding(20, 6), nn.Linear(6, 6)
    run = a_run(nn.ModuleList([times, head]), micro_batch=5)

    for _ in range(2):
        run.backward(xy()[0], lambda x: F.mse_loss(head(x + times(DRAWS[name](len(x)))), x))


OTHERS: dict[str, Callable[[int], torch.Tensor]] = {
    "numpy": lambda n: torch.from_numpy(np.random.randint(0, 20, n)),
    "python": lambda n: torch.tensor([random.randrange(20) for _ in range(n)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_draws_of_other_libraries_are_those_of_the_plain_loop_and_refused_where_a_step_is_split(
    name: str,
) -> None:
    """Nobody can hold them at one number: a coin of theirs would be seen to fall one way only."""
    times, head, found = nn.Embedding(20, 6), nn.Linear(6, 6), []
    model = nn.ModuleList([times, head])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(head(x + times(OTHERS[name](len(x)))), x)

    for guarded in (False, True):
        random.seed(1)
        np.random.seed(1)
        model.zero_grad()
        a_run(model).backward(xy()[0], loss) if guarded else loss(xy()[0]).backward()
        found.append(head.weight.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]
    with pytest.raises(CannotSplit, match="Python's or numpy's RNG"):
        a_run(model, micro_batch=5).backward(xy()[0], loss)


def test_a_mean_over_what_was_drawn_is_refused() -> None:
    """Masked tokens: parts have other numbers of them, each of which would count for more or less."""
    model = nn.Linear(6, 6)

    def loss(x: torch.Tensor) -> torch.Tensor:
        masked = torch.rand(x.shape) < 0.3
        return ((model(x) - x).square() * masked).sum() / masked.sum().clamp(min=1)

    with pytest.raises(CannotSplit, match="samples depend"):
        a_run(model, micro_batch=5).backward(xy()[0], loss)


def test_a_layer_that_is_thawed_later_is_compared_at_once() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    run = a_run(model, micro_batch=5)

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part[0]), part[1])

    for _ in range(4):
        run.backward(xy(), loss)
    model.train()
    with pytest.raises(CannotSplit, match="BatchNorm") as refusal:
        run.backward(xy(), loss)
    assert "start over" not in str(refusal.value.hint), "the steps before were right"


def test_each_of_several_losses_is_compared() -> None:
    model = nn.Linear(6, 4)
    run = a_run(model, micro_batch=5)

    def close(part: Any) -> torch.Tensor:
        made = F.normalize(model(part[0]), dim=1)
        return (made @ made.T).exp().mean()

    for _ in range(2):
        run.backward(xy(), lambda part: F.cross_entropy(model(part[0]), part[1]))
        run.backward(xy(), lambda part: model(part[0]).square().mean())
    with pytest.raises(CannotSplit):
        run.backward(xy(), lambda part: close(part))


@pytest.mark.parametrize("ignored", [-100, 255])
def test_labels_that_are_ignored_in_a_later_batch_are_compared_at_once(ignored: int) -> None:
    model = nn.Linear(6, 4)
    run = a_run(model, micro_batch=5)

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part[0]), part[1], ignore_index=ignored)

    for _ in range(3):
        run.backward(xy(), loss)
    some = torch.where(torch.arange(16) % 3 == 0, ignored, torch.arange(16) % 4)
    with pytest.raises(CannotSplit):
        run.backward(xy(some), loss)


def _by_positives(model: nn.Module) -> Loss:
    def loss(part: Any) -> torch.Tensor:
        is_positive = (part[1] == 0).to(part[0])
        each = F.binary_cross_entropy_with_logits(model(part[0])[:, 0], is_positive, reduction="none")
        return each.sum() / is_positive.sum().clamp(min=1)

    return loss


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("every", [4, 16])
def test_a_sum_divided_by_positives_is_no_sum(every: int, reduction: str) -> None:
    model = nn.Linear(6, 1)

    with pytest.raises(CannotSplit) as refusal:
        a_run(model, micro_batch=5).backward(
            xy(torch.arange(16) % every), _by_positives(model), reduction=reduction
        )
    assert "(sum of the losses, how many)" in str(refusal.value.hint)


def test_a_part_in_which_everything_is_ignored_is_called_so() -> None:
    model = nn.Linear(6, 4)
    run = a_run(model, micro_batch=4)
    labels = torch.arange(16) % 4
    labels[:4] = -100

    with pytest.raises(CannotSplit) as refusal:
        run.backward(xy(labels), lambda part: F.cross_entropy(model(part[0]), part[1]))
    assert "(sum of the losses, how many)" in str(refusal.value.hint)
    assert "learning rate" not in str(refusal.value)


def test_running_statistics_of_an_instance_norm_are_named() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())

    with pytest.raises(CannotSplit, match=r"1\.running_mean changes with each forward pass"):
        a_run(model, micro_batch=5).backward(torch.randn(16, 2, 9), lambda x: model(x).square().mean().sin())


@pytest.mark.filterwarnings("error")
def test_complex_weights_are_compared_with_their_imaginary_parts() -> None:
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
    model = nn.ParameterList([weight])
    x = xy()[0]

    def loss(part: torch.Tensor) -> torch.Tensor:
        return (part.to(weight.dtype) @ weight).abs().square().mean()

    def imaginary(part: torch.Tensor) -> torch.Tensor:
        made = (part.to(weight.dtype) @ weight).imag
        return (made - made.mean(0)).square().mean()

    a_run(model, micro_batch=5).backward(x, loss)
    with pytest.raises(CannotSplit):
        a_run(model, micro_batch=5).backward(x, imaginary)


def test_batch_norm_is_named_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

    def loss(part: Any) -> torch.Tensor:
        print(len(part))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(CannotSplit, match="1 is BatchNorm"):
        a_run(model).backward(xy()[0], loss)
    assert set(capsys.readouterr().out.split()) == {"6", "2", "16"}, "nothing was tried in parts"


def test_a_mean_over_many_pixels_is_no_reason_to_refuse() -> None:
    """The gradient of the bias before it is a sum of thousands of equal numbers, which rounds to one side."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    run = a_run(model, micro_batch=5)
    images, labels = torch.rand(16, 3, 64, 64), torch.arange(16) % 5

    run.backward((images, labels), lambda part: F.cross_entropy(model(part[0]), part[1]))


def test_a_second_method_is_another_loss_in_mixed_precision_too() -> None:
    """What is wrapped around a loss function says nothing of it."""
    model = nn.Linear(5, 3)

    class Losses:
        def plain(self, part: torch.Tensor) -> torch.Tensor:
            return model(part).square().mean()  # type: ignore[no-any-return]

        def centred(self, part: torch.Tensor) -> torch.Tensor:
            made = model(part)
            return (made - made.mean(0)).square().mean()  # type: ignore[no-any-return]

    run = buoy.Run(micro_batch=3, remedies="amp")
    run.track(model=model)
    for _ in range(4):
        run.backward(torch.randn(20, 5), Losses().plain)
    with pytest.raises(CannotSplit):
        run.backward(torch.randn(20, 5), Losses().centred)


def test_another_loss_is_compared_however_many_kinds_of_batches_came_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    run = a_run(model, micro_batch=8)

    def out(part: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(torch.stack(list(part.values()), 1))

    def table() -> dict[str, torch.Tensor]:
        def column() -> torch.Tensor:
            return torch.where(torch.rand(16) < 0.03, torch.zeros(16), torch.rand(16) + 0.01)

        return {str(number): column() for number in range(8)}

    for _ in range(200):  # columns with and without a zero in all combinations
        run.backward(table(), lambda part: out(part).square().mean())

    with pytest.raises(CannotSplit):
        run.backward(table(), lambda part: out(part).mean().square())


class GhostNorm(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1
        )


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, GhostNorm])
def test_statistics_that_backward_computes_again_count_once(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), kind(4), nn.Linear(4, 1)), torch.randn(16, 3)
    once = copy.deepcopy(net)
    once(x)
    run = a_run(net)

    run.backward(x, lambda part: checkpoint(net, part, use_reentrant=False).square().mean())

    assert torch.equal(net[1].running_mean, once[1].running_mean)
