"""The disk reading is of one disk: the one that the run's own files go to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buoy.flight.alarms.warnings import Alarms
from buoy.flight.attempt import Attempt
from buoy.flight.log import FIELDS
from buoy.flight.sampler import Sampler
from buoy.machine import disk
from buoy.view.top import lines, state
from tests.processes import attempt, wait_until

_ELSEWHERE = "/dev/shm"


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    if not os.access(_ELSEWHERE, os.W_OK) or os.stat(_ELSEWHERE).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second file system here")
    folder = tempfile.mkdtemp(dir=_ELSEWHERE)
    yield Path(folder)
    shutil.rmtree(folder)


def test_the_disk_is_the_run_folders_whatever_the_working_directory(tmp_path: Path, other_disk: Path) -> None:
    recording = tmp_path / "0001"
    recording.mkdir()
    sampler = Sampler(os.getpid(), str(recording), str(other_disk))
    sample = dict(zip(FIELDS, sampler.sample(time.monotonic()), strict=True))
    there = disk.space(str(other_disk))

    assert there is not None and sample["disk_total"] == there.total
    assert sample["disk_free"] <= there.total


def test_a_run_opened_on_another_disk_is_the_one_that_is_read_from_then_on_by_name(
    tmp_path: Path, other_disk: Path
) -> None:
    run = other_disk / "cats"
    run.mkdir()
    code = (
        "import sys, time, buoy; watch = buoy.watch('runs/notebook'); watch.step()\n"
        f"sys.stdin.readline(); watch.opened({str(run)!r}, None); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, text=True)
    recording = tmp_path / "runs" / "notebook"
    here, there = disk.space(str(tmp_path)), disk.space(str(other_disk))
    assert here is not None and there is not None

    def shown() -> dict[str, object] | None:
        now = state(Attempt(str(recording), str(attempt(recording)), 1))
        return next((item for item in now["resources"] if item["name"] == "disk"), None)

    try:
        before = wait_until(
            lambda: attempt(recording).joinpath("events.jsonl").exists() and shown(), "a sample"
        )
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        after = wait_until(lambda: (found := shown()) and found.get("of") and found, "the other disk")
        told = lines(state(Attempt(str(recording), str(attempt(recording)), 1)))
    finally:
        child.kill()
        child.wait()

    assert before["limit"] == pytest.approx(here.total, rel=0.01) and before.get("of") is None
    assert after["limit"] == there.total and after["used"] < there.total
    assert any(line.startswith(" disk") and "where cats is kept" in line for line in told)


def test_a_disk_that_is_full_is_told_though_it_was_never_seen_to_grow(tmp_path: Path) -> None:
    sampler = Sampler(os.getpid(), str(tmp_path), str(tmp_path))
    alarms = Alarms({}, sampler)
    sample = sampler.sample(time.monotonic())
    sample[FIELDS.index("disk_total")] = 2 << 20
    told = []
    for second, free in enumerate((1 << 20, 0, 0, 4096)):
        sample[FIELDS.index("disk_free")] = free
        told += [
            (second, each) for each in alarms.feed(sample[0] + second, sample) if each.alarm == "disk-full"
        ]

    assert [(second, each.text) for second, each in told] == [
        (1, "disk 2.0 MiB of 2.0 MiB (100 %): it is full. Delete old checkpoints, or save to another disk.")
    ]
