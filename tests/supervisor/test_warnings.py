"""Warnings a person sees while a real training runs short: one line each, before it is too late."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.processes import attempt, event, events, read, run_python, start_python, wait_until


def test_a_leak_is_told_before_it_kills_and_named_afterwards(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    small_session = make_session(200 << 20)
    code = (
        "import buoy, time; watch = buoy.watch(); kept = []\n"
        "while True: kept.append(bytearray(b'x' * (300 << 10))); watch.step(); time.sleep(0.03)"
    )
    command = [
        sys.executable,
        "-m",
        "buoy",
        "run",
        "--run",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        "-c",
        code,
    ]
    enter = ["sh", "-c", f'echo $$ > {small_session}/cgroup.procs; exec "$@"', "sh"]
    done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=120)

    assert done.returncode == 137
    warned = [line for line in done.stderr.splitlines() if line.startswith("buoy: RAM ")]
    assert len(warned) == 1 and "KiB per step: full in about" in warned[0], done.stderr
    verdict = read(attempt(tmp_path / "run") / "verdict.json")
    assert verdict["cause"]["id"] == "kernel-oom"
    assert "with each step" in verdict["cause"]["next"][0]
    predicted = next(found for found in events(tmp_path / "run") if found["kind"] == "warning")["values"][
        "at_step"
    ]
    assert 0.75 < predicted / verdict["where"]["step"] < 1.33


def test_a_hang_is_told_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    code = (
        "import buoy, threading, time; watch = buoy.watch()\n"
        "def worker(): time.sleep(100)\n"
        "threading.Thread(target=worker, daemon=True).start()\n"
        "for _ in range(5): watch.step(); time.sleep(0.01)\n"
        "lock = threading.Lock(); lock.acquire(); lock.acquire()"
    )
    process = start_python(tmp_path / "run", code, env={**os.environ, "BUOY_HANG_SECONDS": "2"})
    hang = wait_until(lambda: event(tmp_path / "run", "hang"), "the hang")
    stacks = wait_until(
        lambda: next((p.read_text() for p in attempt(tmp_path / "run").glob("process-*/stacks.txt")), ""),
        "stacks",
    )
    process.terminate()
    _, err = process.communicate(timeout=30)

    assert hang["idle"] is True and hang["step"] == 5
    assert "in worker" in stacks and "line 5 in <module>" in stacks
    assert "buoy: No step for" in err and "after step 5" in err


def test_the_end_of_the_session_is_told(tmp_path: Path) -> None:
    done = run_python(tmp_path / "run", "import time; time.sleep(4)", "--time-limit", "30s")
    late = run_python(tmp_path / "late", "import time; time.sleep(6)", "--time-limit", "5s")

    assert "Session time" not in done.stderr
    assert late.stderr.count("Session time") == 1 and "Save a checkpoint" in late.stderr
