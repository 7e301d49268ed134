"""A real Jupyter kernel: cells are marked, an idle kernel is no hang, and its death is explained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import attempt, event, events, read, wait_until

manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")


class Kernel:
    def __init__(self, cwd: Path, **environment: str) -> None:
        self._manager = manager.KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(cwd), env={**os.environ, **environment})
        self._client: Any = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code: str, wait: bool = True) -> None:
        self._client.execute(code)
        if wait:
            reply = self._client.get_shell_msg(timeout=60)
            assert reply["content"]["status"] == "ok", reply["content"]

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.process.pid)

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


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
    kernel.run("# train\nwatch.step(); time.sleep(60)", wait=False)
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
    kernel.run("import buoy, time; watch = buoy.watch('runs/nb'); watch.step()")
    time.sleep(4.0)
    before = [found["kind"] for found in events(tmp_path / "runs/nb")]
    kernel.run("time.sleep(20)", wait=False)

    assert "hang" not in before
    assert wait_until(lambda: event(tmp_path / "runs/nb", "hang"), "the hang")["idle"] is True
