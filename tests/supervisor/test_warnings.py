"""Warnings a person sees while a real training runs short: one line each, before it is too late."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import attempt, buoy, event, events, main_pid, read, run_python, start_python, wait_until


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
    done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=400)

    assert done.returncode == 137
    warned = [line for line in done.stderr.splitlines() if line.startswith("buoy: RAM ")]
    assert len(warned) == 1 and "KiB per step: full in about" in warned[0], done.stderr
    assert "buoy: Memory is held by kept (list of " in done.stderr and "bytearrays" in done.stderr
    verdict = read(attempt(tmp_path / "run") / "verdict.json")
    assert verdict["cause"]["id"] == "kernel-oom"
    assert "with each step: hold less in kept (list of" in verdict["cause"]["next"][0]
    assert verdict["holders"][0]["name"] == "kept" and verdict["holders"][0]["bytes"] > 120 << 20
    predicted = next(found for found in events(tmp_path / "run") if found["kind"] == "warning")["values"][
        "at_step"
    ]
    assert 0.75 < predicted / verdict["where"]["step"] < 1.33


def test_what_another_program_takes_is_not_called_the_trainings_growth(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    """Both are in one session; the training takes its steps and holds what it held."""
    session = make_session(300 << 20)
    steady = "import buoy, time; watch = buoy.watch()\nwhile True: watch.step(); time.sleep(0.03)"
    greedy = "import time; kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20))); time.sleep(0.1)"
    enter = ["sh", "-c", f'echo $$ > {session}/cgroup.procs; exec "$@"', "sh", sys.executable]
    run = ["-m", "buoy", "run", "--run", str(tmp_path / "run"), "--", sys.executable, "-c", steady]
    training = subprocess.Popen([*enter, *run], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: event(tmp_path / "run", "start"), "the recorder")
    neighbour = subprocess.Popen([*enter, "-c", greedy])
    try:
        warning = wait_until(lambda: event(tmp_path / "run", "warning"), "the warning")
    finally:
        neighbour.kill()
        neighbour.wait()
        training.terminate()
        training.communicate(timeout=400)

    assert warning["alarm"] == "ram" and warning["values"]["whose"] == "others", warning
    assert "per step" not in warning["text"] and "Other programs are growing" in warning["text"]


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
    _, err = process.communicate(timeout=400)

    # The other thread only sleeps, and may free the lock: that it hangs for ever is not proven.
    assert (hang["state"], hang["is_certain"], hang["step"]) == ("blocked", False, 5)
    assert "in worker" in stacks and "line 5 in <module>" in stacks
    assert "buoy: No step for" in err and "after step 5" in err


def test_the_end_of_the_session_is_told(tmp_path: Path) -> None:
    done = run_python(tmp_path / "run", "import time; time.sleep(4)", "--time-limit", "30s")
    late = run_python(tmp_path / "late", "import time; time.sleep(6)", "--time-limit", "5s")

    assert "Session time" not in done.stderr
    assert late.stderr.count("Session time") == 1 and "Save a checkpoint" in late.stderr


FILL = """
import sys, time
import {package}

def used():
    return int(next(line for line in open(sys.argv[1] + "/memory.stat") if line.startswith("total_rss ")).split()[1])

def load_data():
    images = []
    while used() < 0.965 * {limit}:
        images.append({thing})
    {then}

load_data()
"""
LIMIT = 400 << 20


Fill = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def fill(tmp_path: Path, make_session: Callable[[int], Path]) -> Iterator[Fill]:
    """A script that fills its session to 97 %, stands there and takes no step, under `buoy run`; ended in any case."""
    started: list[subprocess.Popen[str]] = []

    def begin(package: str, thing: str, then: str = "time.sleep(600)") -> subprocess.Popen[str]:
        started.append(_fill(tmp_path, make_session(LIMIT), package, thing, then))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.kill(main_pid(tmp_path / "run"), signal.SIGKILL)
            process.communicate(timeout=400)


def _fill(tmp_path: Path, group: Path, package: str, thing: str, then: str) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(FILL.format(package=package, thing=thing, then=then, limit=LIMIT))
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    run = [sys.executable, "-m", "buoy", "run", "--run", str(tmp_path / "run"), "--"]
    command = [*enter, *run, sys.executable, str(script), str(group)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def warned(folder: Path, alarm: str) -> dict[str, object] | None:
    return next((found for found in events(folder) if found.get("alarm") == alarm), None)


def ended(process: subprocess.Popen[str], folder: Path, number: int) -> str:
    """What it wrote to stderr, after this signal ended it."""
    os.kill(main_pid(folder), number)
    return process.communicate(timeout=400)[1]


def test_ram_that_stands_at_its_limit_is_warned_of_without_a_step_and_its_variables_are_named(
    tmp_path: Path, fill: Fill
) -> None:
    """Asked while it stands there, and after a SIGTERM that has nothing to do with memory."""
    folder = tmp_path / "run"
    process = fill("numpy", "numpy.ones(1 << 18, 'uint8')")
    wait_until(lambda: warned(folder, "holders"), "the names")
    alive = buoy("why", str(folder)).stdout
    stderr = ended(process, folder, signal.SIGTERM)
    verdict = read(attempt(folder) / "verdict.json")

    told = [line for line in stderr.splitlines() if line.startswith(("buoy: RAM", "buoy: Memory"))]
    assert len(told) == 2, stderr
    assert told[0].startswith("buoy: RAM has been at 38") and "and no step is done:" in told[0]
    assert "(97 %)" in told[0]
    assert told[1].startswith("buoy: Memory is held by images (list of 1,")
    assert "NumPy arrays, 3" in told[1] and told[1].endswith(" in load_data, train.py:12.")

    # Where the machine is busy it still fills while it is watched: "95 to 97 %".
    assert re.search(
        r"It is still running\. RAM has been at (9\d to )?97 % of its limit of 400\.0 MiB for", alive
    )
    assert "no step was" in alive and "images, list of 1," in alive

    cause = verdict["cause"]
    assert (cause["id"], cause["claim"]["grade"]) == ("terminated", "certain")
    assert cause["cascade"][0]["grade"] == "certain"
    assert re.match(
        r"RAM had been at (9\d to )?97 % of its limit of 400\.0 MiB for ", cause["cascade"][0]["text"]
    )
    assert cause["cascade"][0]["text"].endswith("; no step was ever counted")
    assert cause["next"][0].startswith("hold less in images (list of 1,")
    assert "load_data, train.py:12: read it in pieces" in cause["next"][0]
    assert verdict["holders"][0]["name"] == "images" and verdict["holders"][0]["bytes"] > 330 << 20
    assert re.search(r"before: RAM had been at (9\d to )?97 %", stderr)  # the few lines at the end say it too


def test_a_plain_script_without_any_library_names_its_variables_too(tmp_path: Path, fill: Fill) -> None:
    folder = tmp_path / "run"
    process = fill("string", "{len(images): string.digits * 30_000}")
    wait_until(lambda: event(folder, "holders"), "the names")
    threads = len(os.listdir(f"/proc/{main_pid(folder)}/task"))
    ended(process, folder, signal.SIGKILL)
    verdict = read(attempt(folder) / "verdict.json")

    assert threads == 1  # with a second one, Python 3.12 and later warn of a fork
    assert verdict["cause"]["id"] == "killed"
    assert verdict["holders"][0]["name"] == "images"
    assert "list of 1," in verdict["holders"][0]["detail"] and "dicts" in verdict["holders"][0]["detail"]
    assert re.search(
        r"in load_data, train\.py:1[0-2];", verdict["holders"][0]["detail"]
    )  # a slow one still fills


def test_what_cannot_be_read_while_a_call_in_c_keeps_python_busy_is_said(tmp_path: Path, fill: Fill) -> None:
    folder = tmp_path / "run"
    busy = "sum(range(10**13))"  # does not let go of Python's lock
    process = fill("numpy", "numpy.ones(1 << 18, 'uint8')", busy)
    wait_until(lambda: warned(folder, "holders"), "the names")
    stderr = ended(process, folder, signal.SIGTERM)
    verdict = read(attempt(folder) / "verdict.json")

    assert "buoy: RAM has been at" in stderr
    assert "buoy: What holds the memory could not be read: Python did not answer for 10 s" in stderr
    assert "could not be read" in verdict["holders"][0]["detail"] and verdict["holders"][0]["bytes"] is None
    assert "it filled the RAM before its first step" in verdict["cause"]["next"][0]


def test_files_that_the_kernel_can_drop_are_no_use_of_memory(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    """The session's charge is at its limit, all of it a data set that was read."""
    group, folder = make_session(200 << 20), tmp_path / "run"
    code = (
        "import time; block = bytes(1 << 20); file = open('data', 'w+b')\n"
        "for _ in range(400): file.write(block)\n"
        "file.flush()\n"
        "end = time.monotonic() + 20\n"
        "while time.monotonic() < end:\n"
        "    file.seek(0)\n"
        "    while file.read(1 << 20): pass\n"
        f"    charged = int(open('{group}/memory.usage_in_bytes').read())\n"
        "print('charged', charged >> 20)"
    )
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    command = [sys.executable, "-m", "buoy", "run", "--run", str(folder), "--", sys.executable, "-c", code]
    done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=400, cwd=tmp_path)

    assert int(done.stdout.split()[-1]) > 190
    assert "buoy: RAM" not in done.stderr and warned(folder, "ram-level") is None
