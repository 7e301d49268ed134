"""What a real process can still say at its end: who raised the signal, when the exception came, how far it was."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from buoy.flight.beacon import read_beacon
from tests.processes import attempt, wait_until

_WATCHED = "import buoy, ctypes, os, signal, sys, threading, time; buoy.watch('run')\n"
on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the few instructions are known for x86-64 only"
)


def end(folder: Path, code: str) -> tuple[int, Any]:
    """Run a watched script to its end: its return code and what its beacon says."""
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED + code], cwd=folder, capture_output=True, check=False
    )
    return done.returncode, last_word(folder)


def last_word(folder: Path) -> Any:
    (beacon,) = attempt(folder / "run").glob("process-*/beacon")
    return read_beacon(str(beacon))


_AT_EXIT = """
class Late:
    def __del__(self): ctypes.string_at(0)
late = Late()
"""


@on_x86
@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("ctypes.string_at(0)", signal.SIGSEGV),
        ("ctypes.string_at(1 << 63)", signal.SIGSEGV),
        ("ctypes.CDLL(None).div(1, 0); time.sleep(9)", signal.SIGFPE),
        ("t = threading.Thread(target=ctypes.string_at, args=(0,)); t.start(); t.join()", signal.SIGSEGV),
        (_AT_EXIT, signal.SIGSEGV),
    ],
)
def test_a_fault_is_told_by_the_kernel_and_dies_as_it_would_have(
    tmp_path: Path, code: str, number: int
) -> None:
    """Of the code that ran, of a thread's, and of a library's while the interpreter is taken down."""
    returned, said = end(tmp_path, code)

    assert returned == -number
    assert (said.fatal.number, said.fatal.code > 0) == (number, True)
    assert (
        (attempt(tmp_path / "run") / f"process-{_pid(tmp_path)}" / "fault.txt")
        .read_text()
        .startswith("Fatal")
    )


@on_x86
def test_a_signal_that_was_sent_is_told_with_its_sender(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _WATCHED + "time.sleep(60)"], cwd=tmp_path)
    wait_until(
        lambda: list(tmp_path.glob("run/attempts/*/process-*/SIGTERM.txt")), "the script to be watched"
    )
    time.sleep(0.2)
    process.send_signal(signal.SIGSEGV)

    assert process.wait(400) == -signal.SIGSEGV
    fatal = last_word(tmp_path).fatal
    assert (fatal.number, fatal.code, fatal.pid) == (signal.SIGSEGV, 0, os.getpid())


@on_x86
def test_a_forked_child_that_crashes_leaves_no_word_in_its_parents_name(tmp_path: Path) -> None:
    returned, said = end(tmp_path, "if not os.fork(): ctypes.string_at(0)\nprint(os.wait())")

    assert (returned, said.fatal) == (0, None)


@on_x86
def test_a_forked_child_that_is_watched_again_writes_into_its_own_beacon(tmp_path: Path) -> None:
    code = """
from buoy.flight import recorder
child = os.fork()
if child == 0:
    recorder.join(recorder.Attempt("run", "run/attempts/0001", 1))
    ctypes.string_at(0)
os.wait()
os.kill(os.getpid(), signal.SIGSEGV)
"""
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED + code], cwd=tmp_path, capture_output=True, check=False
    )
    words = [read_beacon(str(path)).fatal.code for path in attempt(tmp_path / "run").glob("process-*/beacon")]

    assert done.returncode == -signal.SIGSEGV
    assert sorted(words) == [0, 1]


def test_a_script_that_enabled_faulthandler_itself_keeps_its_output(tmp_path: Path) -> None:
    code = "import faulthandler; faulthandler.enable()\n" + _WATCHED + "ctypes.string_at(0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr


@pytest.mark.parametrize(
    ("code", "returned", "finished"),
    [
        ("pass", 0, True),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, True),
        ("sys.exit(3)", 3, False),
        ("def main(): return 3\nraise SystemExit(main())", 3, False),
        ("def main(): sys.exit(0)\nmain()\nprint()", 0, False),
    ],
)
def test_a_script_that_leaves_before_its_end_says_so(
    tmp_path: Path, code: str, returned: int, finished: bool
) -> None:
    ended, said = end(tmp_path, code)

    assert ended == returned
    assert said.note == {"kind": "exit", "finished": finished}


def test_an_exception_is_dated_when_it_came_not_when_the_process_had_left(tmp_path: Path) -> None:
    code = "import atexit; atexit.register(time.sleep, 1.0)\nprint(time.monotonic())\n{}['label']"
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED + code], cwd=tmp_path, capture_output=True, check=False
    )

    assert done.returncode == 1
    assert last_word(tmp_path).note["t"] - float(done.stdout) < 1.0


def _pid(folder: Path) -> str:
    (found,) = attempt(folder / "run").glob("process-*")
    return found.name.removeprefix("process-")
