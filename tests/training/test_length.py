"""How many steps a training will have: learnt from its epochs, told to `buoy top`, not from half of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from buoy.flight.trainings import training_of
from buoy.training.recording import Length
from buoy.view.top import lines

TRAINING = """
import sys, buoy, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = buoy.Run("runs/cats", save=3)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(6):
    for batch in run.batches(torch.randn(7, 2, 4)):
        if run.step == int(sys.argv[1]):
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        run.backward(batch, lambda part: model(part).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def lengths(tmp_path: Path, number: int) -> list[tuple[str, int]]:
    path = tmp_path / "runs" / "cats" / "attempts" / f"{number:04d}" / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [(event["run"], event["step"]) for event in events if event["kind"] == "length"]


def test_a_training_tells_its_length_once_an_epoch_has_passed_whole(tmp_path: Path) -> None:
    for dies_at in ("18", "-1"):
        subprocess.run(
            [sys.executable, "-c", TRAINING, dies_at], cwd=tmp_path, capture_output=True, timeout=400
        )

    assert lengths(tmp_path, 1) == [(".", 42)]
    assert lengths(tmp_path, 2) == [(".", 42)]  # the epoch it went on in was not whole, the next one was


def test_epochs_of_other_lengths_are_told_again_and_small_changes_are_not() -> None:
    length = Length()
    begun = [(0, 0), (1, 100), (2, 201), (3, 401), (5, 900), (6, 950)]

    assert [length.epoch_begins(epoch, of=7, step=step) for epoch, step in begun] == [
        None, 700, None, 1201, None, 1000,
    ]  # fmt: skip
    assert Length().epoch_begins(1, of=None, step=10) is None


def test_what_is_left_is_told_against_the_deadline() -> None:
    def pace(left: float | None) -> str:
        time = {"spent": 0.0, "limit": 9e9, "left": left} if left is not None else None
        return lines(
            {
                "name": "cats", "attempt": 1, "status": "running", "seconds": 9.0, "run": "runs/cats", "step": 1200,
                "last_step": 5000, "phase": "train", "step_seconds": 0.5, "resources": [], "time": time, "events": [],
                "micro_batch": None, "checkpoint": None, "loop_beside": None, "unrecorded": None, "sample_age": 0.1,
            }
        )[1]  # fmt: skip

    assert pace(None) == pace(7200.0) == "step 1200 of 5000 · 2 steps/s · about 31 min 40 s to go"
    assert pace(600.0) == "step 1200 of 5000 · 2 steps/s · about 1,200 more before the time is up"


def test_a_run_that_is_made_anew_does_not_have_the_length_of_the_last_one() -> None:
    events = [
        {"kind": "opened", "run": "."},
        {"kind": "training", "run": ".", "step": 1},
        {"kind": "length", "run": ".", "step": 700},
        {"kind": "length", "run": "../dogs", "step": 9},
    ]

    assert training_of(events, "runs/cats", "runs/cats").length == 700
    assert training_of([*events, {"kind": "opened", "run": "."}], "runs/cats", "runs/cats").length is None
