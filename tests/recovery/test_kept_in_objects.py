"""What a loss function keeps in objects of objects, in numpy's arrays and in arguments that were bound to it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy
from buoy.microbatch.errors import CannotSplit
from buoy.torch.carried import Carried
from buoy.torch.transaction import Transaction

X, Y = torch.randn(3, 9, 6), torch.randn(3, 9, 4)


class Meter:
    """As in many a script."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Trainer:
    """As many write one: the loss function is a method, meters are attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.meter, self.meters = model, Meter(), {"loss": Meter()}
        self.confusion = np.zeros((4, 4))
        self.memory = Meter()
        self.memory.hidden = torch.zeros(4)  # type: ignore[attr-defined]

    def loss(self, part: Any) -> Any:
        made = self.model(part[0])
        loss = F.mse_loss(made, part[1])
        self.meter.update(loss.item())
        self.meters["loss"].update(loss.item())
        np.add.at(self.confusion, (part[1].argmax(1).numpy(), made.argmax(1).numpy()), 1)
        return loss

    def loss_with_state(self, part: Any) -> Any:
        made = self.model(part[0]) + self.memory.hidden  # type: ignore[attr-defined]
        self.memory.hidden = made.detach().mean(0)  # type: ignore[attr-defined]
        return F.mse_loss(made, part[1])

    def kept(self) -> list[Any]:
        meters = [self.meter, self.meters["loss"]]
        return [*((each.total, each.count) for each in meters), self.confusion.tolist()]


def a_trainer(guarded: bool, name: str, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    trainer, optimizer, run = Trainer(model), torch.optim.SGD(model.parameters(), lr=0.1), buoy.Run(**options)
    run.track(model=model, optimizer=optimizer)
    loss = getattr(trainer, name)
    for batch in zip(X, Y, strict=True):
        if guarded:
            run.backward(batch, loss)
        else:
            loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainer


def test_meters_and_tables_are_those_of_the_plain_loop() -> None:
    plain, guarded = a_trainer(False, "loss"), a_trainer(True, "loss")

    assert guarded.kept() == plain.kept()


def test_a_table_has_each_sample_once_also_where_batches_are_cut() -> None:
    plain, cut = a_trainer(False, "loss"), a_trainer(True, "loss", micro_batch=4)

    assert cut.confusion.tolist() == plain.confusion.tolist()


def test_a_state_in_an_object_of_an_object_is_that_of_the_plain_loop() -> None:
    plain, guarded = a_trainer(False, "loss_with_state"), a_trainer(True, "loss_with_state")

    assert all(map(torch.equal, plain.model.parameters(), guarded.model.parameters()))
    with pytest.raises(CannotSplit, match="keeps a state"):
        a_trainer(True, "loss_with_state", micro_batch=4)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_state_in_a_bound_argument_is_that_of_the_plain_loop(by_name: bool) -> None:
    torch.manual_seed(0)
    model, run = nn.Linear(6, 4), buoy.Run()
    run.track(model=model)

    def loss(part: Any, state: dict[str, torch.Tensor]) -> Any:
        made = model(part[0]) + state["hidden"]
        state["hidden"] = made.detach().mean(0)
        return F.mse_loss(made, part[1])

    plain = {"hidden": torch.zeros(4)}
    loss((X[0], Y[0]), plain).backward()
    expected, model.weight.grad = model.weight.grad, None
    state = {"hidden": torch.zeros(4)}
    bound = functools.partial(loss, state=state) if by_name else functools.partial(_swapped, loss, state)
    run.backward((X[0], Y[0]), bound)

    assert torch.equal(model.weight.grad, expected)  # type: ignore[arg-type]
    assert torch.equal(state["hidden"], plain["hidden"])


def _swapped(loss: Any, state: Any, part: Any) -> Any:
    return loss(part, state)


class Settings(dict[str, Any]):
    """As in many a script: any name is looked up, and a missing one is a KeyError."""

    __getattr__ = dict.__getitem__


class Network(nn.Linear):
    """Keeps its settings in an object."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.held = Meter()
        self.held.settings = Settings(lr=0.1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("home", ["trainer", "model"])
def test_an_object_that_cannot_be_looked_into_is_left_alone_and_the_batch_is_cut(home: str) -> None:
    said: list[str] = []
    trainer = Trainer(nn.Linear(6, 4) if home == "trainer" else Network())
    trainer.settings = Settings(lr=0.1)  # type: ignore[attr-defined]
    transaction = Transaction(say=said.append, event=lambda *a, **k: None, micro_batch=4)
    transaction.track([trainer.model], [])
    transaction.backward((X[0], Y[0]), trainer.loss)

    assert said == []
    assert trainer.meter.count == 3  # the parts, and nothing of the comparison


def test_of_a_dataset_in_an_object_the_rows_are_not_copied() -> None:
    """There may be fifty thousand, and each comparison would copy them all."""
    trainer = Trainer(nn.Linear(6, 4))
    rows = trainer.memory.rows = [[1.0, 2.0] for _ in range(1000)]  # type: ignore[attr-defined]
    trainer.memory.few = {"train": {"loss": [0.5]}}  # type: ignore[attr-defined]
    carried = Carried()
    carried.of(trainer.loss)
    carried.take(is_step=False)
    held = [each for kept in carried._kept for each, _ in kept.held]

    assert any(each is rows for each in held)
    assert not any(each is rows[0] for each in held)
    assert any(each == [0.5] for each in held)


class FullyShardedDataParallel(nn.Module):
    """Known by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def test_what_is_sharded_around_a_tracked_module_is_refused_each_time_and_a_teacher_is_not() -> None:
    model, run = nn.Linear(6, 4), buoy.Run()
    run.track(model=model)
    sharded, teacher = FullyShardedDataParallel(model), FullyShardedDataParallel(nn.Linear(6, 4))
    for _ in range(2):
        with pytest.raises(CannotSplit, match="sharded"):
            run.backward(X[0], lambda part: sharded(part).square().mean())

    run.backward(X[0], lambda part: F.mse_loss(model(part), teacher(part).detach()))
    assert model.weight.grad is not None
