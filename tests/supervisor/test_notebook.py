"""A real Jupyter kernel: cells are marked, an idle kernel is no hang, and its death is explained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import Kernel
from tests.processes import attempt, event, events, read, wait_until


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    started = Kernel(tmp_path, BUOY_HANG_SECONDS="2")
    yield started
    started.end()


def verdict(folder: Path) -> dict[str, Any]:
    path = attempt(folder) / "verdict.json"
    wait_until(path.exists, "the verdict")
    return read(path)  # type: ignore[no-any-return]


def test_a_killed_kernel_is_judged_with_the_cell_it_was_in(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("import buoy, time; watch = buoy.watch('runs/nb')")
    kernel.start("# train\nwatch.step(); time.sleep(60)")
    wait_until(lambda: (attempt(tmp_path / "runs/nb") / "samples-0001.jsonl").exists(), "samples")
    time.sleep(1.0)
    os.kill(kernel.pid, signal.SIGKILL)

    told = verdict(tmp_path / "runs/nb")
    assert told["cause"]["id"] == "killed"
    assert told["where"]["cell"] == "In [2] watch.step(); time.sleep(60)"
    assert told["where"]["step"] == 1


def test_a_kernel_between_two_cells_is_no_hang_but_a_cell_that_blocks_is(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run("import buoy, threading; watch = buoy.watch('runs/nb'); watch.step()")
    time.sleep(4.0)
    before = [found["kind"] for found in events(tmp_path / "runs/nb")]
    kernel.start("watch.step(); lock = threading.Lock(); lock.acquire(); lock.acquire()")

    assert "hang" not in before
    assert wait_until(lambda: event(tmp_path / "runs/nb", "hang"), "the hang")["state"] == "blocked"


def test_a_cell_without_a_step_is_no_hang_though_the_kernel_has_trained(
    kernel: Kernel, tmp_path: Path
) -> None:
    """A plan, a plot, a download: after a run that is finished, nobody knows how long such a cell takes."""
    kernel.run("import buoy, time; watch = buoy.watch('runs/nb'); watch.step(); watch.step()")
    kernel.run("time.sleep(16)")
    found = events(tmp_path / "runs/nb")

    assert [hang["is_quiet"] for hang in found if hang["kind"] == "hang"] == [True]
    assert not [event for event in found if event["kind"] == "warning"]
