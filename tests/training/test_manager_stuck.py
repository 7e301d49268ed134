"""A writer that hangs, and a second process for the same run: neither ends nor hides the training that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint.store import Store
from buoy.flight.attempt import attempt_numbers
from tests.checkpoint.ground import ROOT
from tests.processes import buoy

HEAD = """
import os, signal, sys, time
from buoy.checkpoint import saver
from buoy.training import manager as module, save_policy
from tests.checkpoint.ground import writers
from tests.training.loop import *

def until_committed(step):
    while not any(name.startswith(f"step-{step:09d}") for name in os.listdir(os.path.join(sys.argv[1], "checkpoints"))):
        time.sleep(0.01)
    time.sleep(0.1)  # and the writer waits for the next
"""


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_a_writer_that_hangs_costs_one_bounded_wait_and_is_named_once(tmp_path: Path) -> None:
    code = """
saver._LEAST_PATIENCE, save_policy._RETRY_SECONDS, stopped = 0.4, 0.3, []
def on_step(step):
    if step == 15:
        until_committed(10)
        stopped.extend(writers(sys.argv[1]))
        for pid in stopped: os.kill(pid, signal.SIGSTOP)
train(sys.argv[1], steps=150, save=10, keep=20, pause=0.01, each=on_step)
for pid in stopped: os.kill(pid, signal.SIGKILL)
print("stopped", *stopped)
"""
    done = run(tmp_path / "run", code)

    assert done.returncode == 0, done.stderr
    (writer,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("stopped")]
    said = [line for line in done.stderr.splitlines() if "has not responded" in line]
    assert len(said) == 1 and f"process {writer}, stopped" in said[0], done.stderr
    assert "step 10 is the newest that is safe; training continues" in said[0]
    steps = [entry.step for entry in Store(tmp_path / "run").list()]
    assert steps[0] == 150 and 10 in steps and 20 not in steps, "another writer has taken over"


STOPPED = """
saver._LEAST_PATIENCE, save_policy._RETRY_SECONDS = 1000.0, 0.3
def stop_writers():
    until_committed(10)
    for pid in writers(sys.argv[1]):
        os.kill(pid, signal.SIGSTOP)
        print("stopped", pid, flush=True)
"""


def freed(done: subprocess.CompletedProcess[str]) -> str:
    """The one writer that was stopped, which nobody waits for any more."""
    (writer,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("stopped")]
    os.kill(int(writer), signal.SIGKILL)
    return writer


def test_a_writer_that_hangs_does_not_hold_up_the_end_that_a_signal_asks_for(tmp_path: Path) -> None:
    """Who has sent SIGTERM sends SIGKILL soon: another writer saves the step before that."""
    code = """
module._GRACE_SECONDS = 0.4
def on_step(step):
    if step == 15: stop_writers()
    if step == 22: os.kill(os.getpid(), signal.SIGTERM)  # step 20 is with the writer that is stopped
train(sys.argv[1], steps=5000, save=10, keep=20, pause=0.01, each=on_step)
"""
    done = run(tmp_path / "run", STOPPED + code)
    writer = freed(done)

    assert done.returncode == -signal.SIGTERM, done.stderr
    assert f"process {writer}, stopped" in done.stderr and "while saving step 20" in done.stderr
    last = int(done.stdout.splitlines()[-1].split()[1])
    assert f"buoy: step {last} is saved\n" in done.stderr and 22 <= last < 30
    assert [entry.step for entry in Store(tmp_path / "run").list()] == [last, 10]


def test_a_writer_that_hangs_holds_nobody_up_before_the_session_ends(tmp_path: Path) -> None:
    code = """
def on_step(step):
    if step == 15: stop_writers()
train(sys.argv[1], steps=60, save=10, keep=20, pause=0.02, time_limit=4, each=on_step)
"""
    done = run(tmp_path / "run", STOPPED + code)
    writer = freed(done)

    assert done.stdout.endswith("finished\n"), done.stderr
    assert f"process {writer}, stopped" in done.stderr and "training continues" in done.stderr
    assert Store(tmp_path / "run").list()[0].step == 60, "another writer has taken over"


@pytest.mark.parametrize("recorded", ["run", "train"])
def test_a_second_start_under_buoy_run_does_not_hide_the_training_that_lives(
    tmp_path: Path, recorded: str
) -> None:
    """Whether the recording is in the run's own folder or in one beside it."""
    command = ["run", "--run", recorded, "--", sys.executable, "-m", "tests.training.loop", "run"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    here: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": path}}
    program = [sys.executable, "-m", "buoy", *command, "pause=0.05"]
    training = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, **here)
    assert training.stdout is not None
    while training.stdout.readline().strip() != "step 3":
        assert training.poll() is None
    second, why, runs = buoy(*command, **here), buoy("why", **here), buoy("runs", **here)
    training.terminate()
    training.communicate(timeout=400)

    assert second.returncode == 1 and "another process is writing the checkpoints" in second.stderr
    assert "buoy: this start is not recorded: another process is already training that run" in second.stderr
    assert attempt_numbers(str(tmp_path / recorded)) == [1]
    assert "WriterBusy" not in why.stdout + runs.stdout
    assert "still running" in why.stdout and "running" in runs.stdout, why.stdout + why.stderr + runs.stdout


def test_a_process_that_is_refused_leaves_no_attempt(tmp_path: Path) -> None:
    code = """
import subprocess
again = [sys.executable, "-m", "tests.training.loop", sys.argv[1]]
another_shell = dict(os.environ)
def on_step(step):
    if step == 3:
        tried = subprocess.run(again, capture_output=True, text=True, env=another_shell)
        print("refused" if "another process is writing the checkpoints" in tried.stderr else tried.stderr)
train(sys.argv[1], steps=5, save=10, pause=0.01, each=on_step)
"""
    done = run(tmp_path / "run", code)

    assert "refused" in done.stdout.splitlines(), done.stdout + done.stderr
    assert attempt_numbers(str(tmp_path / "run")) == [1]
