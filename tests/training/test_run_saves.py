"""What a `buoy.Run` promises of its checkpoints, and what it makes of `save` and `metric` calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import buoy
from buoy.checkpoint.store import Store
from buoy.flight import recorder
from buoy.units import parse_bytes


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in the test's own process, which must not become an attempt of a run."""
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def test_the_size_that_is_told_at_the_start_is_that_of_a_small_checkpoint_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with buoy.Run(tmp_path) as run:
        run.track(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for x in run.batches([torch.ones(2, 4)] * 2):
                model(x).sum().backward()
                optimizer.step()
    told = re.search(r"checkpoints of ([\d.]+ \w+), keeping", capsys.readouterr().err)

    assert told is not None
    assert parse_bytes(told[1]) == pytest.approx(Store(tmp_path).list()[0].bytes, rel=0.05)


@pytest.mark.parametrize(
    ("reported", "lines"),
    [([["val_loss"]], 1), ([["train_loss"], ["vall"]], 0), ([["val_loss"]] * 3, 1), ([], 0)],
)
@pytest.mark.parametrize("own_epochs", [False, True])
def test_a_best_metric_that_never_comes_is_told_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reported: list[list[str]],
    lines: int,
    own_epochs: bool,
) -> None:
    with buoy.Run(tmp_path, keep=buoy.Keep(last=1, best="vall")) as run:
        run.track(counters={})
        for _ in range(2) if own_epochs else run.epochs(2):
            for _ in run.batches([1, 2]):
                run.metric(loss=1.0)
            for names in reported:
                run.metric(**dict.fromkeys(names, 1.0))
    said = capsys.readouterr().err

    assert said.count("no metric is called 'vall'") == lines, said
    assert not lines or "reported so far are val_loss; until it comes" in said
