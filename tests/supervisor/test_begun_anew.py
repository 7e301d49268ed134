"""A recording that could not begin, or whose folder is gone: told once, and begun anew by a step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buoy.flight.attempt import attempt_numbers, find_attempt
from buoy.view.top import state
from tests.processes import alive, attempt, buoy, event, events, read, wait_until

_CODE = """
import sys, time, buoy
from buoy.supervisor import upkeep
upkeep.LOOK_SECONDS = upkeep.RETRY_SECONDS = 0.1
{before}
watch = buoy.watch('runs/cats')
watch.opened('kept', None)
while True:
    watch.trains('kept', watch.beacon.count)
    watch.step()
    time.sleep(0.01)
"""
_NO_ROOM = """
import os
class Full:
    def __call__(self, *given):
        if os.path.exists('full'):
            raise OSError(28, 'No space left on device')
        return real(*given)
real, os.posix_fallocate = os.posix_fallocate, Full()
"""


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "project" / "kept").mkdir(parents=True)
    return tmp_path / "project" / "kept"


def start(folder: Path, before: str = "") -> subprocess.Popen[str]:
    code = _CODE.format(before=before)
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def training(kept: Path) -> Iterator[subprocess.Popen[str]]:
    child = start(kept.parent)
    wait_until(lambda: list(attempt(kept.parent / "runs/cats").glob("samples-*")), "the first sample")
    yield child
    child.kill()
    child.communicate()


def test_a_recording_that_found_a_full_disk_begins_once_there_is_room(kept: Path) -> None:
    (kept.parent / "full").touch()
    child = start(kept.parent, _NO_ROOM)
    assert child.stderr is not None
    try:
        told = child.stderr.readline()
        recording = kept.parent / "runs" / "cats"
        left = attempt_numbers(str(recording))
        (kept.parent / "full").unlink()
        begun = child.stderr.readline()
        wait_until(lambda: list(attempt(recording).glob("samples-*")), "a sample")
        now = wait_until(lambda: (found := state(find_attempt(str(recording))))["step"] and found, "a step")
    finally:
        child.kill()
        child.communicate()

    assert told.startswith("buoy: nothing is recorded; training continues: ") and left == []
    assert begun == f"buoy: a new recording starts in {recording}\n"
    assert now["status"] == "running" and now["unrecorded"] is None


def test_a_folder_that_was_moved_away_is_told_and_a_new_recording_begins(
    training: subprocess.Popen[str], kept: Path
) -> None:
    runs = kept.parent / "runs"
    first = event(runs / "cats", "start")
    training.send_signal(signal.SIGSTOP)
    shutil.move(runs, kept.parent / "moved")
    attempt(runs / "cats").mkdir(parents=True)  # another notebook begins in the same place meanwhile
    training.send_signal(signal.SIGCONT)
    assert training.stderr is not None and first is not None
    told = [training.stderr.readline() for _ in range(2)]
    wait_until(lambda: list(attempt(runs / "cats", 2).glob("samples-*")), "a sample of the new one")
    wait_until(lambda: not alive(first["sidecar"]), "the end of the first recorder")
    kinds = [(found["kind"], found.get("run")) for found in events(runs / "cats", 2)]

    assert told[0] == f"buoy: the folder of the recording is gone: {runs / 'cats'}\n"
    assert told[1] == f"buoy: a new recording starts in {runs / 'cats'}\n"
    wait_until(lambda: event(runs / "cats", "training", 2), "the training, announced again")
    assert ("opened", "../../kept") in kinds
    assert read(kept / "run.json")["recorded"][-1]["run"] == "../runs/cats"
    assert training.poll() is None


def test_a_project_that_was_moved_whole_is_not_made_again_where_it_was(
    training: subprocess.Popen[str], kept: Path
) -> None:
    os.rename(kept.parent, kept.parent.parent / "elsewhere")
    assert training.stderr is not None
    told = training.stderr.readline()

    assert told.startswith("buoy: the folder of the recording is gone: ")
    assert told.endswith("; nothing is recorded; training continues\n")
    assert not kept.parent.exists() and training.poll() is None


_UNDER_RUN = """
import shutil, sys, time
from buoy.supervisor import upkeep
from buoy.flight.recorder import current
upkeep.FOLLOW_SECONDS = 0.1
training = current()
training.step()
shutil.rmtree(sys.argv[1])
while training.attempt is not None:  # until it is seen
    training.step()
    time.sleep(0.01)
while training.attempt is None:  # until there is another
    training.step()
    time.sleep(0.01)
training.step()
raise ValueError("after the folder went")
"""


def test_a_folder_removed_under_buoy_run_is_told_and_a_new_recording_begins(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cats"
    done = buoy("run", "--run", str(run), "--", sys.executable, "-c", _UNDER_RUN, str(run), timeout=400)
    verdict = read(attempt(run) / "verdict.json")

    assert f"buoy: the folder of the recording is gone: {run}\n" in done.stderr
    assert done.stderr.count(f"buoy: a new recording starts in {run}\n") == 1
    assert done.returncode == 1
    assert "ValueError: after the folder went" in verdict["cause"]["claim"]["text"]
    assert verdict["where"]["step"] > 2
