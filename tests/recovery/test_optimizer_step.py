"""An optimizer's step happens whole or has not happened; hooks and schedulers see one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import buoy
from buoy.microbatch.errors import BadLoss, OutOfMemory, TornStep
from buoy.testing import byte_budget
from buoy.testing.budget import PretendedDevice, out_of_memory
from buoy.torch.step.optimizer import make_atomic
from buoy.torch.step.transaction import Transaction


class Guard:
    """Says that there is room, or not."""

    inside = False

    def __init__(self, room: bool) -> None:
        self.room = room
        self.recoveries = 0

    def has_room(self, parameter: torch.Tensor, need: int) -> bool:
        return self.room

    def limited(self, parameter: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def recovered(self, what: str) -> None:
        self.recoveries += 1

    def way_back(self) -> Callable[[], object]:
        return lambda: None


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
    assert [*apart[1].state_dict()["state"]] == [0, 1, 2, 3]


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


def lbfgs_weights(fail: FailAt | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two steps through a run, the first of which may fail; and the random state after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return run.backward(torch.ones(5, 3), lambda part: model(part).square().mean())

    for number in range(2):
        with fail if fail is not None and number == 0 else nullcontext():
            optimizer.step(closure)
    assert fail is None or fail.left <= 0
    return weights(model), torch.get_rng_state()


@pytest.mark.parametrize("operation", ["aten.cat", "aten.neg", "aten.dot", "aten.sub.Tensor"])
def test_lbfgs_out_of_memory_in_its_own_operations_leaves_no_torn_step(operation: str) -> None:
    """Also in its very first step, inside of which the first `backward` comes; closures draw the same numbers again."""
    expected, random = lbfgs_weights(None)
    found, random_then = lbfgs_weights(FailAt(operation, 2))

    assert all(map(torch.equal, expected, found))
    assert torch.equal(random, random_then)


class Counting(torch.optim.Optimizer):
    """Counts wherever somebody's own optimizer may count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps, self.seen, self.mean = 0, [], None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.seen.append(self.steps)
        self.late = self.steps
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("old", []).append(parameter.grad.square())
                state["n"] = state.get("n", 0) + 1
                parameter.sub_(parameter.grad / (state["old"][-1].sqrt() + 1), alpha=group["lr"] / state["n"])
            self.mean = 1.0

    def counted(self) -> Any:
        per_parameter = [(len(state["old"]), state["n"]) for state in self.state.values()]
        return self.steps, self.seen, self.mean, self.late, self.param_groups[0]["count"], per_parameter


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("before", [0, 1])
def test_what_somebody_elses_optimizer_counts_is_counted_once(room: bool, before: int) -> None:
    whole, failing = build(Counting, room), build(Counting, room)
    for _ in range(before):
        failing[1].step()
    with FailAt("aten.sqrt"):
        failing[1].step()
    for _ in range(before + 1):
        whole[1].step()

    assert failing[1].counted() == whole[1].counted()  # type: ignore[attr-defined]
    assert all(map(torch.equal, weights(whole[0]), weights(failing[0])))


def test_a_loss_that_steps_the_optimizer_is_noticed_by_every_run_that_tracks_it() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = [buoy.Run(), buoy.Run()]
    for run in runs:
        run.track(model=model, optimizer=optimizer)
        run.backward(torch.ones(4, 3), lambda part: model(part).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    then = weights(model)

    def stepping(part: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return model(part).square().mean()

    for run in runs:
        with pytest.raises(BadLoss, match="steps the optimizer"):
            run.backward(torch.ones(4, 3), stepping)
    assert all(map(torch.equal, then, weights(model)))


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


@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.Adam(parameters, 0.1),
    lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
])  # fmt: skip
def test_a_first_step_for_which_there_is_no_room_has_not_happened(make: Any) -> None:
    """One parameter owns the memory, and small ones come before it: none of them may be done without it."""
    seen = set()
    for room in range(9):  # times the largest parameter, beside weights and gradients
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 512), nn.Linear(512, 1)).double()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer = make(model.parameters())
        transaction = Transaction(say=lambda words: None, event=lambda *a, **k: None)
        transaction.track([model], [optimizer])
        before, largest = weights(model), 64 * 512 * 8
        held = 2 * sum(parameter.nbytes for parameter in model.parameters())
        done = True
        with byte_budget(held + room * largest + largest // 4):
            for parameter in model.parameters():  # the device knows of what was used on it
                parameter.detach().view(-1), parameter.grad.view(-1)  # type: ignore[union-attr]
            try:
                optimizer.step()
            except OutOfMemory:
                done = False
        seen.add(done)
        changed = [not a.equal(b) for a, b in zip(before, weights(model), strict=True)]
        assert all(changed) if done else not any(changed), (room, changed)
        assert done or not optimizer.state
    assert seen == {True, False}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["", "foreach", "fused"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_no_group_is_stepped_twice_when_the_state_of_the_next_does_not_fit(
    optimizer_class: Any, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with and without decay, as everywhere. A fused step leaves no mark on the weights that it has written."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        momentum = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
        groups = [{"params": layer.parameters()} for layer in model]
        optimizer = optimizer_class(groups, lr=0.1, **momentum, **options)
        model(torch.ones(5, 3)).square().sum().backward()
        return model, optimizer

    expected, plain = begin()
    plain.step()
    for number in range(1, 10):
        model, optimizer = begin()
        make_atomic(optimizer, Guard(room=True))
        left = number

        def failing(real: Any) -> Any:
            def made(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise out_of_memory(0, "made")
                return real(*args, **kwargs)

            return made

        with monkeypatch.context() as patched:  # no mode: one would leave no marks either
            for name in ("zeros_like", "empty_like"):
                patched.setattr(torch, name, failing(getattr(torch, name)))
            try:
                optimizer.step()
            except TornStep:
                assert not options.get("fused")
                continue
        assert all(map(torch.equal, weights(model), weights(expected)))
