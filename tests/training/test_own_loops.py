"""Loops as people write them around `run.batches`: evaluations inside, stages of training, searches before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import buoy
from buoy.checkpoint.store import Store
from buoy.flight import recorder
from buoy.training import ranks
from buoy.training.tracking import Counting


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


class Killed(Exception):  # noqa: N818 - says what happened
    pass


Step = Callable[..., None]


def training(
    folder: Path, kill_at: int = 0, **optimizer: Any
) -> tuple[buoy.Run, nn.Module, Step, dict[int, float]]:
    """A run, its model, one step of its training that is killed after its `kill_at`-th, and the losses by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    first = torch.optim.SGD(model.parameters(), **{"lr": 0.01, **optimizer})
    run = buoy.Run(folder, save=3)
    run.track(model=model, optimizer=first)
    losses: dict[int, float] = {}

    def step(x: torch.Tensor, optimizer: torch.optim.Optimizer = first) -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[run.step] = loss.item()
        if run.step == kill_at:
            raise Killed

    return run, model, step, losses


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(32.0).reshape(8, 4) / 32), batch_size=2, shuffle=True)


def rest_of(losses: dict[int, float], after: int) -> dict[int, float]:
    return {step: loss for step, loss in losses.items() if step > after}


def with_evaluations(folder: Path, kill_at: int = 0) -> dict[int, float]:
    """Three epochs of four batches; after every second step the model is evaluated in the body, through the run."""
    run, model, step, losses = training(folder, kill_at)
    loader, others = data(), data()
    try:
        for _ in range(3):
            for (x,) in run.batches(loader):
                step(x)
                if run.step % 2 == 0:
                    for (y,) in run.batches(others):
                        model(y)
    finally:
        run.finish()
    return losses


@pytest.mark.parametrize("kill_at", [5, 8, 11])
def test_an_evaluation_inside_the_body_does_not_hide_the_place(kill_at: int, tmp_path: Path) -> None:
    """Loops that were begun in the bodies of a loop that is done are not begun again on the way back."""
    whole = with_evaluations(tmp_path / "whole")
    with pytest.raises(Killed):
        with_evaluations(tmp_path / "run", kill_at)
    saved = Store(tmp_path / "run").list()[0].step

    assert with_evaluations(tmp_path / "run") == rest_of(whole, saved)


def test_an_evaluation_with_workers_that_stay_draws_the_same_after_a_resume(tmp_path: Path) -> None:
    def train(folder: Path, kill_at: int = 0) -> dict[int, float]:
        run, model, step, losses = training(folder, kill_at)
        loader = data()
        others = DataLoader(
            TensorDataset(torch.ones(4, 4)), batch_size=2, num_workers=1, persistent_workers=True
        )
        try:
            for _ in run.epochs(4):
                for (x,) in run.batches(loader):
                    step(x)
                for (y,) in others:
                    model(y)
        finally:
            run.finish()
        return losses

    whole = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(
            tmp_path / "killed", kill_at=7
        )  # in the second epoch: its evaluation is the first of the new process
    assert train(tmp_path / "killed") == rest_of(whole, 6)


def test_a_place_that_is_not_come_by_again_is_told_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, step, _ = training(tmp_path / "run", kill_at=8)
    loader = data()
    with pytest.raises(Killed):
        for _ in range(3):
            for (x,) in run.batches(loader):
                step(x)
    run.finish()
    other, _, step, losses = training(tmp_path / "run")
    for (x,) in other.batches(loader):  # one epoch only, and the place is in the second
        step(x)
    other.finish()

    assert losses == {}
    assert (
        "NOTHING WAS TRAINED: the script did not get back to its position at step 6"
        in capsys.readouterr().err
    )


def without_batches(folder: Path, kill_at: int = 0) -> dict[int, float]:
    """A `while` of its own, as nanoGPT's, that makes its batches itself and is saved by the script."""
    run, _, step, losses = training(folder, kill_at)
    done = {"steps": 0}
    run.track(done=done)
    try:
        while done["steps"] < 10:
            step(torch.randn(2, 4))
            done["steps"] += 1
            if done["steps"] % 4 == 0:
                run.save()
        run._loop.save_the_end(is_known=False)  # as at exit
    finally:
        run.finish()
    return losses


def test_a_loop_without_batches_draws_on_where_it_was_saved(tmp_path: Path) -> None:
    whole = without_batches(tmp_path / "whole")
    with pytest.raises(Killed):
        without_batches(tmp_path / "killed", kill_at=6)
    assert without_batches(tmp_path / "killed") == rest_of(whole, 4)


def test_the_end_of_a_resumed_loop_without_batches_is_saved(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        without_batches(tmp_path, kill_at=6)
    without_batches(tmp_path)
    assert Store(tmp_path).list()[0].step == 10


def test_steps_in_no_loop_of_the_run_are_told_if_nothing_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, step, _ = training(tmp_path)
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    for _ in range(8):
        step(torch.ones(2, 4))
        clock.now += 50
    run.finish()
    assert (
        capsys.readouterr().err.count(
            "nothing was saved for 2 min 30 s: these steps are outside every loop over"
        )
        == 1
    )


def test_steps_between_loops_of_the_run_are_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, step, _ = training(tmp_path)
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    for _ in run.epochs(5):
        for (x,) in run.batches(data()):
            step(x)
        step(torch.ones(2, 4))
        clock.now += 100
    run.finish()
    assert "nothing was saved" not in capsys.readouterr().err


@pytest.mark.parametrize("through_run", [False, True])
def test_a_save_in_the_middle_of_an_epoch_that_is_taken_for_its_end_is_told_once(
    through_run: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, step, _ = training(tmp_path)
    for _ in run.epochs(2):
        for (x,) in run.batches(data()) if through_run else data():
            step(x)
            run.save()
        run.save()
    run.finish()
    told = capsys.readouterr().err.count(
        "epoch 1 continues after `run.save()` at step 1, which buoy took for its end"
    )
    assert told == (0 if through_run else 1)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def in_stages(folder: Path, kill_at: int = 0) -> tuple[dict[int, float], int]:
    run, model, step, losses = training(folder, kill_at)
    loader = data()
    try:
        for (x,) in run.batches(loader):
            step(x)
        all_layers = torch.optim.Adam(model.parameters())
        run.track(all_layers=all_layers)
        for _ in range(3):
            for (x,) in run.batches(loader):
                step(x, all_layers)
    finally:
        run.finish()
    return losses, run.step


def test_a_second_stage_with_an_optimizer_of_its_own_counts_and_is_saved(tmp_path: Path) -> None:
    whole, steps = in_stages(tmp_path / "whole")
    with pytest.raises(Killed):
        in_stages(tmp_path / "run", kill_at=14)

    assert steps == 16 and sorted(whole) == list(range(1, 17))
    assert Store(tmp_path / "run").list()[0].step == 12
    assert in_stages(tmp_path / "run") == (rest_of(whole, 12), 16)


def test_of_two_optimizers_in_one_batch_one_counts() -> None:
    counting = Counting(())
    counting.name("generator", late=False)
    counting.name("critic", late=False)
    counted = []
    for batch in range(6):
        counting.batch_begins()
        counted += [counting.stepped("critic"), batch % 3 == 2 and counting.stepped("generator")]
    counting.loop_ends()

    assert sum(counted) == 2, "the first that was named counts, as seldom as it steps"
    for _ in range(2):  # a stage in which the other one trains alone: known once it is over
        counting.batch_begins()
        counted.append(counting.stepped("critic"))
        counting.loop_ends()
    assert counted[-2:] == [False, True]
    assert Counting(counting.state()).stepped("critic")
    counting.name("late", late=True)
    counting.batch_begins()
    assert [counting.stepped(name) for name in ("late", "generator", "late")] == [True, False, True]


def test_an_optimizer_named_before_the_loop_is_no_stage_after_a_resume(tmp_path: Path) -> None:
    def train(kill_at: int = 0) -> list[int]:
        run, model, step, losses = training(tmp_path / "run", kill_at)
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(other=other)
        try:
            for _ in run.epochs(2):
                for (x,) in run.batches(data()):
                    other.step()
                    step(x)
        finally:
            run.finish()
        return sorted(losses)

    with pytest.raises(Killed):
        train(kill_at=6)

    assert train() == [4, 5, 6, 7, 8]


def test_steps_before_the_loop_are_not_counted_again(tmp_path: Path) -> None:
    """Those of a search for the learning rate, which a script that is started again does again."""

    def train(kill_at: int = 0) -> tuple[dict[int, float], int]:
        run, _, step, losses = training(tmp_path / "run", kill_at)
        for _ in range(5):
            step(torch.zeros(2, 4))
        losses.clear()
        try:
            for _ in run.epochs(2):
                for (x,) in run.batches(data()):
                    step(x)
        finally:
            run.finish()
        return losses, run.step

    with pytest.raises(Killed):
        train(kill_at=11)

    losses, steps = train()
    assert sorted(losses) == [10, 11, 12, 13] and steps == 13


def test_another_learning_rate_in_the_script_is_told_and_how_to_change_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(epochs: int, **settings: Any) -> str:
        run, _, step, _ = training(tmp_path / "run", **settings)
        for _ in run.epochs(epochs):
            for (x,) in run.batches(data()):
                step(x)
        run.finish()
        return capsys.readouterr().err

    assert "keeps its saved settings" not in train(1) + train(2)
    said = train(3, lr=0.5)

    assert "optimizer keeps its saved settings; the script now says lr=0.5 (was 0.01)" in said
    assert "training continues from step 8, epoch 3 of 3" in said
