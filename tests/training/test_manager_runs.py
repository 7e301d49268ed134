"""Several runs of one process, as in a notebook: the recording keeps them apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import buoy
from tests.processes import events, wait_until
from tests.training.test_manager import HEAD

CODE = """
import os, sys
import torch, buoy

def train(folder, killed_at=None):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = buoy.Run(folder)
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(3):
        for batch in run.batches(torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)):
            model(batch).sum().backward()
            optimizer.step()
            if run.step == killed_at:
                os.kill(os.getpid(), 9)

train(sys.argv[1] + "/a")
made = buoy.Run(sys.argv[1] + "/c")
train(sys.argv[1] + "/b", killed_at=6)
"""


def test_each_run_of_a_killed_process_is_told_by_its_own_steps_and_end(tmp_path: Path) -> None:
    """The recording is in the first one's folder; what was finished there is finished."""
    subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, timeout=400)
    wait_until((tmp_path / "a/attempts/0001/verdict.json").exists, "the verdict")
    told = {name: buoy.why(str(tmp_path / name)) for name in "abc"}

    assert {name: verdict.cause.id for name, verdict in told.items()} == {
        "a": "finished", "b": "killed", "c": "not-begun",
    }  # fmt: skip
    assert told["a"].where.step == 12
    assert told["b"].where.step == 6  # its own count, from the first step of another optimizer on
    assert buoy.why(str(tmp_path / "a"), 1).cause.id == "killed"


IN_TURNS = """
from buoy.flight import recorder
a, b = (module.CheckpointManager(sys.argv[1] + name) for name in ("/a", "/b"))
with a.loop(), b.loop():
    for step in range(3):
        a._look = b._look = 0.0
        a.due(step), b.due(step)
with a.loop():
    a.due(3)
    a.recorder.step(4)
b.recorder.step(30)  # as a run that goes on says where it is
with b.loop():
    b.due(30)
"""


def test_loops_that_run_in_turns_are_told_once_each(tmp_path: Path) -> None:
    """Not at every step anew; and the one that goes on alone is told again."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + IN_TURNS, str(tmp_path)], capture_output=True, text=True, timeout=400
    )
    told = [
        (event["run"], event["step"], event["left"], event["together"])
        for event in events(tmp_path / "a")
        if event["kind"] == "training"
    ]

    assert done.returncode == 0, done.stderr
    assert told == [(".", 0, 0, False), ("../b", 0, 0, True), (".", 3, 0, False), ("../b", 30, 4, False)]


BESIDE = """
import buoy, json
from buoy.flight.attempt import find_attempt
from buoy.view.top import lines, state
folder = sys.argv[1] + "/a"
a = module.CheckpointManager(folder)

def train(first, last):
    with a.loop():
        for step in range(first, last):
            a._look = 0.0
            a.due(step)
            with a.loop():
                pass  # a validation within it
            a.recorder.beacon.step()

train(0, 5)
a.recorder.claims(a.folder, 5)
a.recorder.beacon.step()  # its own optimizer, after its loop
while state(find_attempt(folder), folder)["status"] == "no sample yet":
    time.sleep(0.05)
between = state(find_attempt(folder), folder)
for _ in range(3):
    a.recorder.beacon.step()
    time.sleep(0.02)
beside = state(find_attempt(folder), folder)
train(6, 8)
again = state(find_attempt(folder), folder)
a.recorder.step()
a.recorder.step()
print(json.dumps([between, beside, again, lines(beside)]), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_loop_without_a_run_is_told_apart_from_the_run_beside_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + BESIDE, str(tmp_path)], capture_output=True, text=True, timeout=400
    )
    assert done.stdout, done.stderr
    between, beside, again, shown = json.loads(done.stdout)
    wait_until((tmp_path / "a/attempts/0001/verdict.json").exists, "the verdict")
    told = [
        (event["kind"], event.get("step"), event.get("left"))
        for event in events(tmp_path / "a")
        if event["kind"] in ("training", "loop")
    ]
    named, unnamed = buoy.why(str(tmp_path / "a")), buoy.why(str(tmp_path))

    assert told == [("training", 0, 0), ("loop", None, 6), ("training", 6, 3), ("loop", None, 8)]
    assert (between["status"], between["step"], between["loop_beside"]) == ("running", 6, None)
    assert (beside["status"], beside["step"], beside["loop_beside"]) == ("left unfinished", 6, 3)
    assert "a loop without a run trains in its process: step 3 of its own" in shown
    assert (again["status"], again["step"]) == ("running", 8)
    assert named.cause.id == "left"
    assert "stopped at step 8, unfinished; a loop without a run trained next" in named.cause.claim.text
    assert (unnamed.cause.id, unnamed.where.step) == ("killed", None)
    assert "its training had stopped at step 8" in unnamed.cause.cascade[0].text
