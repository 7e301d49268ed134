"""A recorder that dies beside a watched process: the readings are called old, and another one is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from buoy.flight.attempt import find_attempt
from buoy.view import top
from tests.processes import alive, attempt, events, wait_until

_CODE = """
import sys, time, buoy
from buoy.supervisor import upkeep
upkeep.LOOK_SECONDS = 0.1
watch = buoy.watch('runs/cats')
watch.step(7)
for line in sys.stdin:
    for each in range(10000):
        watch.step()
        time.sleep(0.01)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CODE], cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield child
    child.kill()
    child.communicate()


def sidecars(folder: Path) -> list[int]:
    return [each["sidecar"] for each in events(folder) if each["kind"] == "start"]


def kill_last_sidecar(folder: Path) -> None:
    pid = sidecars(folder)[-1]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "the sidecar's end")


def test_without_a_recorder_readings_are_called_old_and_a_step_starts_another(
    watched: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "cats"
    wait_until(lambda: list(attempt(folder).glob("samples-*")) and sidecars(folder), "the first sample")
    found = find_attempt(str(folder))
    wait_until(lambda: top.state(found)["step"] == 7, "the step in a sample")
    fresh = top.state(found)
    kill_last_sidecar(folder)
    with monkeypatch.context() as later:
        later.setattr(top, "time", SimpleNamespace(time=lambda: time.time() + 180))
        stale = top.state(found)

    assert fresh["unrecorded"] is None and "recorded" not in "\n".join(top.lines(fresh))
    assert stale["status"] == "running" and stale["unrecorded"]["recorder"] == "gone"
    assert stale["unrecorded"]["seconds"] > 175 and stale["seconds"] > 175
    assert top.lines(stale)[1].startswith("nothing is recorded since 3 min")
    assert "the recorder is gone" in top.lines(stale)[1]

    assert watched.stdin is not None
    watched.stdin.write("go\n")
    watched.stdin.flush()
    wait_until(lambda: len(sidecars(folder)) == 2, "another sidecar")
    wait_until(lambda: [e for e in events(folder) if e["kind"] == "sidecar"], "the word of it")
    wait_until(lambda: (attempt(folder) / "samples-0002.jsonl").exists(), "samples of its own")

    assert [e["times"] for e in events(folder) if e["kind"] == "sidecar"] == [1]
    assert top.state(found)["unrecorded"] is None


def test_the_fourth_death_of_the_recorder_is_its_last(watched: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "cats"
    assert watched.stdin is not None and watched.stderr is not None
    watched.stdin.write("go\n")
    watched.stdin.flush()
    for started in range(1, 5):
        wait_until(lambda: len(sidecars(folder)) == started, "a sidecar")  # noqa: B023 - called at once
        kill_last_sidecar(folder)
    said = [watched.stderr.readline() for _ in range(4)]

    assert all("was restarted" in line for line in said[:3])
    assert (
        said[3]
        == "buoy: the recorder crashed again and will not be restarted: nothing is recorded; training continues\n"
    )
    assert len(sidecars(folder)) == 4 and watched.poll() is None
