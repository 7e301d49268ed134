"""Real Jupyter kernels whose cells are run and whose displays are collected."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
kernelspec = pytest.importorskip("jupyter_client.kernelspec")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

PATIENCE = 240
"""Seconds without a message: TensorFlow alone takes a minute to import where ten others wait for each core."""


class Kernel:
    """One kernel; `run` gives what the cell displayed, as a front end would get it."""

    def __init__(self, cwd: Path, python: str = sys.executable, **environment: str) -> None:
        self._manager = manager.KernelManager()
        command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = kernelspec.KernelSpec(
            argv=command, display_name="python", language="python"
        )
        self._manager.start_kernel(cwd=str(cwd), env={**os.environ, **environment})
        self._client: Any = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.process.pid)

    def start(self, code: str) -> None:
        """Send a cell and do not wait."""
        self._client.execute(code)

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a cell to its end: the messages a front end would show, with their kind."""
        sent = self._client.execute(code)
        return shown_by(sent, lambda: self._client.get_iopub_msg(timeout=PATIENCE))

    def shown_until(self, code: str, enough: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Send a cell that takes long: what it shows, up to the first message that is enough, or to its end."""
        sent = self._client.execute(code)
        last: list[dict[str, Any]] = []

        def receive() -> dict[str, Any]:
            if last and enough(last[0]):
                return {**last[0], "msg_type": "status", "content": {"execution_state": "idle"}}
            last[:] = [self._client.get_iopub_msg(timeout=PATIENCE)]
            return last[0]

        return shown_by(sent, receive)

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def shown_by(cell: str, receive: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What a cell that was sent shows, up to its end; `receive` gives the kernel's next message."""
    shown: list[dict[str, Any]] = []
    while True:
        message = receive()
        if message["parent_header"].get("msg_id") != cell or message.get("channel", "iopub") != "iopub":
            continue
        kind = message["msg_type"]
        if kind == "status" and message["content"]["execution_state"] == "idle":
            return shown
        if kind not in ("status", "execute_input"):
            shown.append({"kind": kind, **message["content"]})


def html(shown: list[dict[str, Any]]) -> str:
    """All HTML of a cell's output."""
    return "\n".join(item.get("data", {}).get("text/html", "") for item in shown)


INTERRUPTED = """
import os, signal
from buoy.training.manager import CheckpointManager
keeper = CheckpointManager("runs/cats")
with keeper.loop():
    for step in range(3):
        if keeper.due(step):
            keeper.stop_if_asked()  # my last line
        os.kill(os.getpid(), signal.SIGINT)
"""
"""A cell that trains and is interrupted: buoy holds the signal back until the step is done."""


def traceback_of(shown: list[dict[str, Any]]) -> str:
    """What a front end shows of the exception that ended a cell."""
    return "\n".join(line for item in shown for line in item.get("traceback", ()))
