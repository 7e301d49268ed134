"""An optimizer's step happens whole or has not happened; hooks and schedulers see one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from buoy.microbatch.errors import TornStep
from buoy.testing.budget import PretendedDevice, out_of_memory
from buoy.torch.optimizer_step import make_atomic


class Guard:
    """Says that there is room, or not."""

    inside = False

    def __init__(self, room: bool) -> None:
        self.room = room
        self.recoveries = 0

    def has_room(self, device: torch.device, need: int) -> bool:
        return self.room

    def recovered(self, what: str) -> None:
        self.recoveries += 1


class FailAt(PretendedDevice):
    """The n-th operation of a kind fails."""

    def __init__(self, operation: str, number: int = 1) -> None:
        super().__init__()
        self.operation, self.left = operation, number

    def before(self, func: Any) -> None:
        if self.operation in str(func):
            self.left -= 1
            if self.left == 0:
                raise out_of_memory(0, str(func))


def build(
    make: Callable[[Any], torch.optim.Optimizer], room: bool
) -> tuple[nn.Module, torch.optim.Optimizer, Guard]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    guard = Guard(room)
    make_atomic(optimizer, guard)
    model(torch.ones(5, 3)).square().sum().backward()
    return model, optimizer, guard


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def counted() -> Iterator[list[str]]:
    """Hooks of the whole process."""
    calls: list[str] = []
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    handles = [
        register_optimizer_step_pre_hook(lambda *a: calls.append("global before")),
        register_optimizer_step_post_hook(lambda *a: calls.append("global after")),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("room", [True, False])
def test_hooks_run_once_and_in_order_however_the_step_is_done(room: bool) -> None:
    _, optimizer, guard = build(adamw, room)
    with counted() as calls:
        optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
        optimizer.register_step_post_hook(lambda *a: calls.append("after"))
        with FailAt("aten.zeros_like"):
            optimizer.step()

    assert calls == ["global before", "before", "global after", "after"]
    assert guard.recoveries >= 1


def test_step_by_parameter_is_the_same_step() -> None:
    together, apart = build(adamw, room=True), build(adamw, room=False)
    for _ in range(3):
        together[1].step()
        apart[1].step()

    assert all(map(torch.equal, weights(together[0]), weights(apart[0])))
    assert len(apart[1].param_groups[0]["params"]) == 4


def test_a_failure_while_state_is_made_is_undone_even_without_copies() -> None:
    model, optimizer, _ = build(adamw, room=True)
    other = build(adamw, room=True)
    with FailAt("aten.zeros_like", 5):  # the third parameter's state
        optimizer.step()
    other[1].step()

    assert all(map(torch.equal, weights(model), weights(other[0])))


def test_a_step_torn_without_copies_is_said_and_never_passed_over() -> None:
    _, optimizer, _ = build(adamw, room=True)
    optimizer.step()
    with FailAt("aten.sqrt", 2), pytest.raises(TornStep, match="half-way") as caught:
        optimizer.step()

    assert "last checkpoint" in (caught.value.hint or "")


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("room", [True, False])
def test_schedulers_see_the_step(scheduler_first: bool, room: bool, recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(3, 2)
    optimizer = adamw(model.parameters())
    if not scheduler_first:
        make_atomic(optimizer, Guard(room))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if scheduler_first:
        make_atomic(optimizer, Guard(room))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()

    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    model, optimizer, _ = build(adamw, room=False)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert len(calls) == 1


def test_an_optimizer_that_looks_at_all_parameters_together_is_stepped_whole() -> None:
    class Normalised(torch.optim.SGD):
        """One step length for all: stepping parameter by parameter would be another step."""

        def step(self, closure: Any = None) -> None:
            grads = [p.grad for g in self.param_groups for p in g["params"]]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= group["lr"] * parameter.grad / norm

    plain, guarded = (
        build(lambda p: Normalised(p, lr=0.1), True),
        build(lambda p: Normalised(p, lr=0.1), False),
    )
    plain[1].step()
    with FailAt("aten.div", 2):
        guarded[1].step()

    assert all(map(torch.equal, weights(plain[0]), weights(guarded[0])))
    assert guarded[2].recoveries == 1


def test_lbfgs_works() -> None:
    model, optimizer, _ = build(lambda p: torch.optim.LBFGS(p, lr=0.1), room=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)

    assert optimizer.step(closure) < first  # type: ignore[operator]


def test_a_step_that_somebody_else_has_wrapped_is_called_whole() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = adamw(model.parameters())
    plain, calls = optimizer.step, []
    optimizer.step = lambda *a, **k: calls.append(1) or plain(*a, **k)  # type: ignore[method-assign]
    make_atomic(optimizer, Guard(False))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    assert calls == [1]


def test_tracking_twice_changes_nothing() -> None:
    _, optimizer, guard = build(adamw, room=True)
    step = optimizer.step
    make_atomic(optimizer, guard)

    assert optimizer.step == step


def test_an_atomic_optimizer_can_be_copied_and_saved() -> None:
    import copy
    import pickle

    _, optimizer, _ = build(adamw, room=True)
    optimizer.step()

    assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1
