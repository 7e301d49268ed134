"""A recording that was begun without a mirror, joined by a run that has one: its log has a second home too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from buoy.flight.attempt import attempts_of
from buoy.machine import host
from buoy.verdict import why
from tests.processes import alive, attempt, events, read, wait_until

_CODE = """
import sys, time, buoy
from buoy.training.manager import CheckpointManager
from buoy.training.options import Options
buoy.watch('runs/notebook')                       # what `%load_ext buoy` does
keeper = CheckpointManager('runs/pets/cats', Options(mirror='../drive'))
keeper.newest()
with keeper.loop():
    for step in range(1, 100_000):
        keeper.recorder.step(step)
        keeper.due(step)
        time.sleep(0.01)
"""


def lose_machine(machine: Path) -> None:
    """Start the training on a machine of its own, and take that away with everything on it once a copy is made."""
    drive = machine.parent / "drive"
    (machine / "runs/pets/cats").mkdir(parents=True)
    if (drive / "cats/run.json").exists():  # a person copies the run from the drive first
        shutil.copy(drive / "cats/run.json", machine / "runs/pets/cats")
    before = attempts_of(str(drive / "cats"))
    child = subprocess.Popen([sys.executable, "-c", _CODE], cwd=machine, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(attempts_of(str(drive / "cats"))) > len(before), "the copy of the log")
        sidecar = next(e for e in events(machine / "runs/notebook") if e["kind"] == "start")["sidecar"]
        os.kill(sidecar, signal.SIGKILL)
        wait_until(lambda: not alive(sidecar), "the sidecar's end")
    finally:
        child.kill()
        child.communicate()
    shutil.rmtree(machine)
    for path in [*drive.glob("*/run.json"), *drive.glob("notebook/attempts/*/attempt.json")]:
        path.write_text(path.read_text().replace(host.boot_id() or "", f"of {machine.name}"))


def test_the_loss_of_the_machine_is_told_from_the_mirror_alone(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    lose_machine(tmp_path / "first")
    told = why(str(drive / "cats"))
    copy = attempt(drive / "notebook")

    assert told.cause.id == "machine-lost"
    assert (copy / "samples-tail.jsonl").exists() and (drive / "notebook" / "run.json").exists()

    first = read(copy / "attempt.json")["wall"]
    lose_machine(tmp_path / "second")  # a new machine counts its attempts from 1 again

    assert read(copy / "attempt.json")["wall"] == first
    assert [each.number for each in attempts_of(str(drive / "cats"))] == [1, 2]
    assert time.time() - read(attempt(drive / "notebook", 2) / "attempt.json")["wall"] < 60
