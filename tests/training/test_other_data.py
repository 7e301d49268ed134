"""A run that goes on in the middle of an epoch over other data, or in other batches, says so at once and once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import buoy
from buoy.flight import recorder
from buoy.torch.data.loader import ResumableLoader


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in the test's own process, which must not become an attempt of a run."""
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def train(folder: Path, samples: int, size: int, stop: int | None = None) -> None:
    loader = DataLoader(TensorDataset(torch.ones(samples, 4)), batch_size=size, shuffle=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = buoy.Run(folder, save=1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for (x,) in run.batches(loader):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step == stop:
                run.save()
                run.finish()
                return
    run.finish()


@pytest.mark.parametrize(
    ("samples", "size", "words"),
    [
        (28, 4, "made with 20 samples, now there are 28: in the rest of this epoch some may come twice"),
        (12, 4, "made with 20 samples, now there are 12"),
        (20, 5, "made in batches of 4, now they are of 5"),
        (20, 4, None),
    ],
)
def test_other_data_after_a_resume_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], samples: int, size: int, words: str | None
) -> None:
    train(tmp_path, 20, 4, stop=3)
    capsys.readouterr()
    train(tmp_path, samples, size)
    said = [line for line in capsys.readouterr().err.splitlines() if "bit for bit" in line]

    assert len(said) == (words is not None)
    assert words is None or f"this resume is not bit for bit: the checkpoint was {words}" in said[0]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (DataLoader(list(range(20)), 4), DataLoader(list(range(24)), 4), "20 samples, now there are 24"),
        (list(range(5)), list(range(7)), "5 batches, now there are 7"),
        (DataLoader(list(range(20)), 4), DataLoader(list(range(20)), 4), None),
    ],
)
def test_a_trainers_loader_tells_it_too(before: Any, after: Any, words: str | None) -> None:
    first = ResumableLoader(before, pytest.fail, seed=1)
    next(iter(first))
    said: list[str] = []
    rest = list(ResumableLoader(after, said.append, seed=1, saved=first.place(1)))

    assert rest and len(said) == (words is not None)
    assert words is None or words in said[0]
