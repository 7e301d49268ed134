"""A training that leaves the finite numbers says so once, and its last good checkpoint stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import buoy
from buoy.checkpoint.store import Store
from buoy.flight import recorder
from buoy.view.checkpoints import listed


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in the test's own process, which must not become an attempt of a run."""
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def train(folder: Path, bad: tuple[int, ...], *, of_buoy: bool) -> None:
    """Twelve steps, each saved, two kept; those in `bad` have an infinite loss, or a NaN that gets into the weights."""
    loader = DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = buoy.Run(folder, save=1, keep=2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.batches(loader):
            is_bad = run.step + 1 in bad
            if of_buoy:
                factor = float("inf") if is_bad else 1.0
                run.backward(
                    x, lambda part, by=factor: (1 + model(part).square().sum()) * by, reduction="sum"
                )
            else:
                (model(x).sum() * (float("nan") if is_bad else 1.0)).backward()
            if is_bad and of_buoy:
                optimizer.zero_grad()  # as a gradient scaler leaves out what it cannot use
            optimizer.step()
            optimizer.zero_grad()
            run.save()
    run.finish()


@pytest.mark.parametrize("of_buoy", [True, False])
def test_the_last_checkpoint_before_nan_stays_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_buoy: bool
) -> None:
    train(tmp_path, tuple(range(5, 13)), of_buoy=of_buoy)
    entries = Store(tmp_path).list()
    said = [line for line in capsys.readouterr().err.splitlines() if "not a finite number" in line]

    assert [entry.step for entry in entries] == [12, 11, 4]
    assert len(said) == 1 and "at step 5" in said[0] and "step 4, the last one before that" in said[0]
    rows = listed("run", entries, {}).splitlines()
    assert f"`buoy ckpt restore {tmp_path} 4 --to {tmp_path}-from-4`" in said[0]
    assert "loss not finite" in rows[2] and "last finite" in rows[4] and "last finite" not in rows[3]


def test_a_loss_that_is_finite_again_needs_no_older_one(tmp_path: Path) -> None:
    train(tmp_path, (5, 6, 7), of_buoy=True)

    assert [entry.step for entry in Store(tmp_path).list()] == [12, 11]
    assert [entry.about["finite"] for entry in Store(tmp_path).list()] == [True, True]


def test_a_finite_training_is_told_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, (), of_buoy=False)

    assert [entry.step for entry in Store(tmp_path).list()] == [12, 11]
    assert "finite" not in capsys.readouterr().err
