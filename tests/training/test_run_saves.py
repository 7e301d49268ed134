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

    assert said.count("no metric is named 'vall'") == lines, said
    assert not lines or "reported so far are val_loss; until it is reported" in said


@pytest.mark.parametrize("own_epochs", [True, False])
@pytest.mark.parametrize("where", ["at the end", "at the start", "before the loop"])
def test_a_save_between_two_loops_is_found_again_and_nothing_is_done_twice(
    tmp_path: Path, where: str, own_epochs: bool
) -> None:
    """What is tracked changes before and after the save; the script is left at its second one."""

    def train(folder: Path, leave_after: int | None = None) -> list[float]:
        state, weight = {"value": 1.0}, nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        run = buoy.Run(folder, save="24h")
        run.track(state=state, weight=weight, optimizer=optimizer)
        seen = []

        def save(place: str) -> None:
            if place != where:
                return
            run.save()
            seen.append(run.step)
            if len(seen) == leave_after:
                raise InterruptedError

        for epoch in range(3) if own_epochs else run.epochs(3):
            save("at the start")
            state["value"] = state["value"] * 3 + epoch
            save("before the loop")
            for x in run.batches([1.0, 2.0]):
                optimizer.zero_grad()
                (weight * x * state["value"]).backward()
                optimizer.step()
                if where == "at the end":
                    run.save()
            state["value"] += weight.item()
            save("at the end")
        run.finish()
        return [state["value"], weight.item()]

    whole = train(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        train(tmp_path / "left", leave_after=2)

    assert train(tmp_path / "left") == whole


def test_saves_in_a_loop_that_is_not_over_batches_go_on_as_ever(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for last in (3, 6):
        run = buoy.Run(tmp_path, save="24h")
        run.track(weight=weight, optimizer=optimizer)
        while run.step < last:
            (weight * 2).backward()
            optimizer.step()
            assert run.save() is not None
        run.finish()

    assert [entry.step for entry in Store(tmp_path).list()] == [6, 5, 4]


def test_a_finished_run_with_saves_of_its_own_stays_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        with buoy.Run(tmp_path) as run:
            run.track(counters={})
            for _ in range(2):
                for _ in run.batches([1, 2]):
                    pass
                run.save()
    said = capsys.readouterr().err

    assert said.count("is finished at step 4") == 2 and "going on" not in said
    assert sum(entry.step == 4 for entry in Store(tmp_path).list()) <= 2
