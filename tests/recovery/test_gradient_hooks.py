"""What a hook sees of a gradient is what it sees in the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy

X, Y = torch.randn(3, 8, 6, dtype=torch.float64), torch.randn(3, 8, 4, dtype=torch.float64)


def clips(model: nn.Module, seen: list[torch.Tensor]) -> None:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.02, 0.02)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def reads(model: nn.Module, seen: list[torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


def steps_and_lets_go(model: nn.Module, seen: list[torch.Tensor]) -> None:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        if len(seen) > 2:  # with the second batch
            parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def three_batches(
    hooks: Callable[[nn.Module, list[torch.Tensor]], None], guarded: bool, **options: Any
) -> list[torch.Tensor | None]:
    """The gradients after three batches of one's own accumulation, and what the hooks saw of the last."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    run = buoy.Run(**options)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[torch.Tensor] = []
    for number, batch in enumerate(zip(X, Y, strict=True)):
        if guarded:
            run.backward(batch, lambda part: F.mse_loss(model(part[0]), part[1]))
        else:
            F.mse_loss(model(batch[0]), batch[1]).backward()
        if number == 0:
            seen.clear()
            hooks(model, seen)
        elif number == 1:
            known = [p.grad for p in model.parameters()]
    assert all(p.grad is None or p.grad is one for p, one in zip(model.parameters(), known, strict=True))
    return [*(p.grad for p in model.parameters()), *seen]


@pytest.mark.parametrize("hooks", [clips, reads, steps_and_lets_go])
def test_with_accumulation_of_ones_own_it_sees_all_that_was_accumulated(hooks: Any) -> None:
    plain, guarded = three_batches(hooks, False), three_batches(hooks, True)

    assert len(plain) == len(guarded)
    for one, other in zip(plain, guarded, strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))


def test_in_a_batch_that_is_cut_the_last_it_sees_is_the_whole_gradient() -> None:
    plain, cut = three_batches(reads, False), three_batches(reads, True, micro_batch=3)

    for one, other in zip(plain[:2] + plain[-2:], cut[:2] + cut[-2:], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
