"""What trains along with what is tracked, and is not tracked itself, is told before it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import buoy
from buoy.errors import BuoyError
from buoy.flight import recorder


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


class Weighting:
    """A loss with a weight that is learnt, which saves a copy of it by methods of its own."""

    def __init__(self) -> None:
        self.weight = torch.full((3,), 0.5, requires_grad=True)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight.detach().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.data.copy_(state["weight"])


class Trainer:
    """Has its scheduler inside, and saves it itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedulers[0].load_state_dict(state)


def said_of(
    folder: Path, capsys: pytest.CaptureFixture[str], *beside: torch.Tensor, **tracked: object
) -> str:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *beside], lr=0.1)
    made = {name: build(optimizer) if isinstance(build, type) else build for name, build in tracked.items()}
    with buoy.Run(folder, save=1) as run:
        run.track(model=model, optimizer=optimizer, **made)
        for x in run.batches([torch.ones(4, 2)] * 3):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return capsys.readouterr().err


def test_a_parameter_that_no_checkpoint_has_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of(tmp_path / "run", capsys, torch.zeros(3, requires_grad=True), seen={"sum": torch.zeros(3)})
    assert said.count("optimizer trains parameters that are not tracked") == 1
    assert "parameter 2 of group 0, (3,)" in said


def test_parameters_that_are_saved_are_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, lying, frozen = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(5)
    weighting = Weighting()
    said = said_of(
        tmp_path / "run", capsys, own, lying, weighting.weight, frozen,
        own=own, beside={"lying": [lying]}, weighting=weighting,
    )  # fmt: skip
    assert "not tracked" not in said


def test_a_scheduler_that_is_not_tracked_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with buoy.Run(tmp_path / "run", save=1) as run:
        run.track(model=model, optimizer=optimizer)
        for x in run.batches([torch.ones(4, 2)] * 3):
            model(x).mean().backward()
            optimizer.step()
            scheduler.step(1.0)
    said = capsys.readouterr().err
    assert said.count("a ReduceLROnPlateau sets the learning rate of optimizer and is not tracked") == 1


def test_a_group_that_training_adds_is_warned_about_and_its_checkpoint_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(epochs: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        with buoy.Run(tmp_path / "run", save=1) as run:
            run.track(model=model, optimizer=optimizer)
            for epoch in run.epochs(epochs):
                if epoch == 1:
                    optimizer.add_param_group({"params": list(model[0].parameters())})
                for x in run.batches([torch.ones(4, 2)] * 3):
                    model(x).mean().backward()
                    optimizer.step()

    train(2)
    assert capsys.readouterr().err.count("optimizer gained 1 parameter group during training") == 1

    with pytest.raises(BuoyError, match="has 1 parameter groups, the checkpoint 2: make all of them before"):
        train(3)


def test_a_metric_inside_a_model_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchmetrics import MeanMetric

    model = nn.Sequential(nn.Linear(2, 1))
    model.seen, mean = MeanMetric(), MeanMetric()
    with buoy.Run(tmp_path / "run") as run:
        run.track(model=model, mean=mean)
        run.save()
        run.save()
    said = capsys.readouterr().err
    assert said.count("model has metrics whose counts are not saved: seen.") == 1
    assert "mean has" not in said


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, Trainer])
def test_a_tracked_scheduler_is_not_told(
    kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not tracked" not in said_of(tmp_path / "run", capsys, scheduler=kind)


def test_a_scheduler_that_is_gone_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # of a search for the learning rate
    with buoy.Run(tmp_path / "run") as run:
        run.track(model=model, optimizer=optimizer)
        for x in run.batches([torch.ones(4, 2)] * 3):
            model(x).mean().backward()
            optimizer.step()
    assert "not tracked" not in capsys.readouterr().err
