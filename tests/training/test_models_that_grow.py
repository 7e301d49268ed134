"""Modules whose buffers get their shape in training, and those that get parameters there."""

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


class Bank(nn.Module):
    """A mean that is `None` at first, as a data-dependent scale is, and a memory bank that fills."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.zeros(rows, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: Any = self.mean
        self.mean = x.mean(0) if mean is None else 0.9 * mean + 0.1 * x.mean(0)
        self.bank: torch.Tensor = torch.cat([self.bank, x])
        out: torch.Tensor = self.layer(x - self.mean + self.bank.mean(0))
        return out


def quantized() -> nn.Module:
    """Its observers find their shape in the first batch."""
    quantization = torch.ao.quantization
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(2, 3), nn.Linear(3, 1))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model.train(), inplace=True)
    return model


def train(folder: Path, model: nn.Module, steps: int) -> dict[int, float]:
    """One batch for each step, from where the run is up to `steps`; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = buoy.Run(folder, save=1)
    run.track(model=model, optimizer=optimizer)
    losses = {}
    try:
        for (x,) in run.batches([(torch.full((4, 2), float(step)).cumsum(0),) for step in range(8)]):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[run.step] = loss.item()
            if run.step == steps:
                break
    finally:
        run.finish()
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [Bank, quantized])
def test_buffers_that_grew_in_training_come_back_into_a_new_model(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = train(tmp_path / "whole", build(), 6)
    torch.manual_seed(0)
    first = train(tmp_path / "run", build(), 3)
    rest = train(tmp_path / "run", build(), 6)  # from other weights, which are replaced

    assert first.keys() | rest.keys() == whole.keys()
    assert {**first, **rest} == whole


def test_a_buffer_of_another_shape_that_did_not_grow_is_another_model(tmp_path: Path) -> None:
    def track(rows: int) -> None:
        model = nn.Linear(2, 1)
        model.register_buffer("table", torch.zeros(rows))
        with buoy.Run(tmp_path / "run") as run:
            run.track(model=model)
            run.save()

    track(3)

    with pytest.raises(BuoyError, match=r"table is \(3\) in the checkpoint, but \(5\) here"):
        track(5)


def test_parameters_that_come_after_track_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with buoy.Run(tmp_path / "run", save=1) as run:
        run.track(model=model, optimizer=optimizer)
        for (x,) in run.batches([(torch.ones(1, 2),)] * 4):
            model(x).sum().backward()
            optimizer.step()
            if run.step == 2:
                model.append(nn.Linear(2, 1))

    told = capsys.readouterr().err
    assert told.count("model gained parameters during training: 1.weight, 1.bias. A restarted script") == 1
