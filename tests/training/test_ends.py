"""How a training ends, and what a script finds that is started again after it: loops of one's own, exits, epochs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import buoy
from buoy.checkpoint.store import Store
from buoy.flight import recorder

OWN_LOOP = """
import sys, torch, buoy
from torch.utils.data import DataLoader, TensorDataset

def train(folder, epochs=3, leave_at=None, leave=sys.exit):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.arange(32.0).reshape(8, 4)), batch_size=2, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    run = buoy.Run(folder, save=4)
    run.track(model=model, optimizer=optimizer)
    losses = {}
    for _ in range(epochs):
        for (x,) in run.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[run.step] = loss.item()
            if run.step == leave_at:
                leave()
    return run, losses, torch.rand(2).tolist()
"""
program: dict[str, object] = {}
exec(OWN_LOOP, program)  # the same text is a script that is left in its middle
train = program["train"]


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def whole(folder: Path, **options: object) -> tuple[buoy.Run, dict[int, float], list[float]]:
    """A training that comes to its end, as at the end of its script."""
    run, losses, drawn = train(folder, **options)  # type: ignore[operator]
    run._loop.save_the_end(is_known=False)
    run.finish()
    return run, losses, drawn


def test_a_finished_loop_of_ones_own_runs_no_body_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last step was saved by the rhythm already, before anybody could know that it was the last."""
    _, losses, drawn = whole(tmp_path)
    first = Store(tmp_path).list()
    capsys.readouterr()
    again, nothing, drawn_again = whole(tmp_path)
    words = capsys.readouterr().err

    assert len(losses) == 12 and nothing == {} and again.step == 12
    assert drawn_again == drawn
    assert (
        f"{tmp_path} is finished at step 12" in words and "a new training needs a folder of its own" in words
    )
    assert Store(tmp_path).list() == first, "a finished run was written again"
    _, more, _ = whole(tmp_path, epochs=4)
    assert sorted(more) == [13, 14, 15, 16]


def test_the_epoch_of_a_loop_of_ones_own_is_not_known_and_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole(tmp_path, epochs=1)
    (tmp_path / "more").mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "more", leave_at=6, leave=interrupt)  # type: ignore[operator]
    capsys.readouterr()
    whole(tmp_path / "more")

    assert {entry.about["epoch"] for entry in Store(tmp_path).list()} == {None}
    assert "buoy: resumed from step 4\n" in capsys.readouterr().err


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_script_that_leaves_in_the_middle_of_an_epoch_goes_on_there(tmp_path: Path) -> None:
    """`sys.exit()` in the loop's body is no end of the training: nothing of the epoch is passed over."""
    _, losses, drawn = whole(tmp_path / "whole")
    left = subprocess.run(
        [sys.executable, "-c", OWN_LOOP + f"train({str(tmp_path / 'left')!r}, leave_at=6)"],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    newest = Store(tmp_path / "left").list()[0]
    _, rest, drawn_then = whole(tmp_path / "left")

    assert left.returncode == 0, left.stderr
    assert "buoy: the loop ended early, at step 6: if you start it again, the training resumes" in left.stderr
    assert newest.step == 6 and newest.about["reason"] == "exit" and newest.about["finished"] is False
    assert sorted(rest) == [7, 8, 9, 10, 11, 12]
    assert rest == {step: loss for step, loss in losses.items() if step > 6} and drawn_then == drawn


def test_a_run_that_was_only_opened_is_not_called_finished(tmp_path: Path) -> None:
    with buoy.Run(tmp_path / "new") as run:
        run.track(model=torch.nn.Linear(1, 1))
    assert Store(tmp_path / "new").list() == []

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "begun", leave_at=6, leave=interrupt)  # type: ignore[operator]
    with buoy.Run(tmp_path / "begun"):
        pass
    assert [entry.about["finished"] for entry in Store(tmp_path / "begun").list()] == [False]


def test_a_break_that_a_with_tells_to_be_the_end_trains_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it the next start goes on, past a number of steps that was reached."""
    trained = []
    for _ in range(2):
        with buoy.Run(tmp_path / "run") as run:
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters())
            run.track(model=model, optimizer=optimizer)
            for x in run.batches([torch.ones(2, 4)] * 8):
                model(x).sum().backward()
                optimizer.step()
                trained.append(run.step)
                if run.step == 5:
                    break
        run._loop.save_the_end(is_known=False)  # as at the end of the script

    assert trained == [1, 2, 3, 4, 5]
    assert "the loop ended early" not in capsys.readouterr().err


def test_epochs_are_counted_from_1_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Keras's own progress bar counts them; `run.epoch` and the files begin with 0."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    run = buoy.Run(tmp_path / "run")
    run.track(model=model, optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        for _ in run.epochs(2):
            for x in run.batches([torch.ones(2, 4)] * 4):
                model(x).sum().backward()
                optimizer.step()
                if run.step == 6:
                    run.save()
                    interrupt()
    run.finish()
    again = buoy.Run(tmp_path / "run")
    again.track(model=model, optimizer=optimizer)
    again.finish()

    assert Store(tmp_path / "run").list()[0].about["epoch"] == 1
    assert "buoy: resumed from step 6 (epoch 2)\n" in capsys.readouterr().err
