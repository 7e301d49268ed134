"""Small helpers for tests that start, watch and kill real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 30.0


def buoy(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    options.setdefault("timeout", 120)
    return subprocess.run(
        [sys.executable, "-m", "buoy", *arguments], capture_output=True, text=True, **options
    )


def run_python(folder: Path, code: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`buoy run` a piece of Python, recorded into `folder`."""
    return buoy("run", "--run", str(folder), *options, "--", sys.executable, "-c", code, **more)


def start_python(folder: Path, code: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    """The same, left running."""
    command = [
        sys.executable,
        "-m",
        "buoy",
        "run",
        "--run",
        str(folder),
        *options,
        "--",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def die_as_usual() -> None:
    """Tests that `nohup` started, or a script with `&`, would hand their ignored signals on to what must die."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition holds; fail in words when it never does."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE:.0f} s in vain for {what}")


def attempt(folder: Path, number: int = 1) -> Path:
    """The folder of an attempt."""
    return folder / "attempts" / f"{number:04d}"


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def events(folder: Path, number: int = 1) -> list[dict[str, Any]]:
    """The events of an attempt."""
    try:
        lines = (attempt(folder, number) / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def event(folder: Path, kind: str, number: int = 1) -> dict[str, Any] | None:
    """The first event of this kind, if there is one yet."""
    return next((found for found in events(folder, number) if found["kind"] == kind), None)


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main_pid(folder: Path, number: int = 1) -> int:
    """The pid of the training process, once it is recorded."""
    path = attempt(folder, number) / "attempt.json"
    wait_until(path.exists, "attempt.json")
    return int(read(path)["pid"])


def open_descriptors(pid: int) -> list[str]:
    """What a process has open."""
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
