"""Tensors that are tracked in a dict beside the model: trained ones, computed ones, views of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import buoy
from buoy.flight import recorder


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def train(folder: Path, steps: int) -> dict[int, float]:
    """A temperature that is learnt, in a dict; and a hidden state that is made from a learnt one in each epoch."""
    torch.manual_seed(1)
    model, first = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    learnt: dict[str, Any] = {"temperature": torch.zeros(1, requires_grad=True), "more": [torch.ones(2)]}
    trained = [*model.parameters(), first, learnt["temperature"]]
    optimizer = torch.optim.Adam(trained, lr=0.1)
    carried: dict[str, Any] = {}
    run = buoy.Run(folder, save=1)
    run.track(model=model, first=first, optimizer=optimizer, learnt=learnt, carried=carried)
    losses: dict[int, float] = {}
    try:
        for _ in run.epochs(2):
            carried["hidden"] = first * 2.0
            for x in run.batches([torch.ones(3, 2) * number for number in range(4)]):
                hidden = model(x + carried["hidden"])
                loss = hidden.square().mean() * (-learnt["temperature"]).exp().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                carried["hidden"] = hidden.detach().mean(0)
                losses[run.step] = loss.item()
                if run.step == steps:
                    return losses
    finally:
        run.finish()
    return losses


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_tensor_in_a_dict_is_trained_on_after_a_resume(stop: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 8)
    assert train(tmp_path / "cut", stop) | train(tmp_path / "cut", 8) == whole


def test_a_conjugate_is_not_taken_for_what_it_is_a_view_of(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    views = {"number": number, "conjugate": number.conj(), "imaginary": number.conj().imag}
    expected = {name: view.clone() for name, view in views.items()}
    with buoy.Run(tmp_path) as run:
        run.track(views=views)
        run.save()

    found: dict[str, torch.Tensor] = {}
    with buoy.Run(tmp_path) as run:
        run.track(views=found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_kept_as_the_best_are_never_written_into_the_model(tmp_path: Path) -> None:
    def start(steps: int) -> list[float]:
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        best: dict[str, Any] = {"weights": dict(model.named_parameters())}  # until something better comes
        run = buoy.Run(tmp_path, save=1)
        run.track(model=model)
        run.track(best=best)
        for number in run.batches(range(4)):
            if number == steps:
                break
            best["weights"] = {name: each.detach().clone() for name, each in model.named_parameters()}
            with torch.no_grad():
                model.weight.add_(1.0)
        run._loop.is_finished = True
        assert run._loop.manager is not None
        run._loop.manager.finish()
        return [float(each) for each in model.weight.detach().flatten()]

    start(2)
    resumed = start(2)

    torch.manual_seed(1)
    assert resumed == pytest.approx([float(each) + 2 for each in nn.Linear(2, 1).weight.detach().flatten()])
