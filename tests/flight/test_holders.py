"""A living process names what holds its memory when it is asked: in a thread where it has others, and not otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buoy.flight.holders import sentence
from buoy.flight.stacks import HOLDERS_SIGNAL, HolderAsker
from tests.processes import wait_until

GIB = 1 << 30
ATTEND = """
import os, sys, time
from buoy.flight.holders import Attendant
attendant = Attendant(sys.argv[1])
{setup}
kept = [bytes(1 << 20) for _ in range(50)]
print(len(os.listdir("/proc/self/task")), flush=True)
{then}
"""


class Process:
    """A process that can be asked."""

    def __init__(self, folder: Path, setup: str, then: str) -> None:
        code = ATTEND.format(setup=setup, then=then)
        # BLAS makes threads of its own, as many as there are cores.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.threads = int(self.process.stdout.readline())
        self.asker = HolderAsker(str(folder.parent))
        os.rename(folder, folder.parent / f"process-{self.process.pid}")
        os.symlink(folder.parent / f"process-{self.process.pid}", folder)

    def answer(self) -> dict[str, Any]:
        self.asker.warned("ram", self.process.pid, time.monotonic())
        return dict(wait_until(lambda: self.asker.hear(time.monotonic()), "an answer"))


Begin = Callable[..., Process]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a process that can be asked, and ends it in any case."""
    (tmp_path / "process").mkdir()
    started: list[Process] = []

    def start(setup: str = "", then: str = "time.sleep(60)") -> Process:
        started.append(Process(tmp_path / "process", setup, then))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_a_plain_process_answers_without_a_thread(begin: Begin) -> None:
    process = begin()
    found = process.answer()

    assert process.threads == 1
    assert found["variables"][0]["name"] == "kept"
    assert process.asker.to_tell() == ("ram", sentence(found))


def test_one_with_numpy_answers_in_a_thread_though_its_main_thread_never_comes_back(begin: Begin) -> None:
    """It waits in C for something that never comes: Python's lock is free, and no handler of Python's can run."""
    wait = "import ctypes; c, gate = ctypes.CDLL(None), bytearray(64); at = (ctypes.c_char * 64).from_buffer(gate)"
    process = begin("import numpy", f"{wait}; c.sem_init(at, 0, 0); c.sem_wait(at)")
    found = process.answer()

    assert process.threads == 2
    assert found["variables"][0]["name"] == "kept" and is_about(found["variables"][0]["bytes"], 50 << 20)


def is_about(size: float, wanted: float) -> bool:
    return 0.8 * wanted < size < 1.25 * wanted


def test_where_addresses_are_limited_no_thread_takes_any(begin: Begin) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); import numpy"

    assert begin(limit).answer()["variables"][0]["name"] == "kept"


@pytest.mark.parametrize("package", ["string", "numpy"])
def test_a_forked_child_lives_on_when_it_gets_the_signal(begin: Begin, package: str) -> None:
    then = "pid = os.fork()\nif not pid: time.sleep(60)\nprint(pid, flush=True)\ntime.sleep(60)"
    process = begin(f"import {package}", then)
    assert process.process.stdout is not None
    child = int(process.process.stdout.readline())
    os.kill(child, HOLDERS_SIGNAL)
    found = process.answer()
    state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    os.kill(child, 9)

    assert state == "S" and found["variables"][0]["name"] == "kept"


def test_a_script_that_closes_all_files_keeps_its_own_and_the_thread_leaves(
    begin: Begin,
) -> None:
    """Nothing of its own may be read, or waited for, through a number that was ours."""
    then = (
        "os.closerange(3, 65536); reading, writing = os.pipe()\n"
        "for number in range(4000, 4096): os.dup2(reading, number)\n"
        "os.write(writing, b'mine'); time.sleep(1); print(os.read(reading, 9), flush=True)\n"
        "os.write(writing, b'again'); time.sleep(1); print(os.read(reading, 9), flush=True); time.sleep(60)"
    )
    process = begin("import numpy", then)
    assert process.process.stdout is not None
    read = [process.process.stdout.readline() for _ in range(2)]

    assert read == ["b'mine'\n", "b'again'\n"]


def test_a_process_that_does_not_listen_is_never_sent_a_signal() -> None:
    asker = HolderAsker("/nowhere")
    sleeping = subprocess.Popen(["sleep", "60"])
    asker.warned("ram", sleeping.pid, 0.0)
    heard = [asker.hear(now) for now in (0.1, 5.0, 20.0)]
    lives = sleeping.poll() is None
    sleeping.kill()
    sleeping.wait()

    assert lives and heard == [None, None, None] and asker.to_tell() is None


def test_each_level_is_asked_for_once_and_again_only_after_it_fell() -> None:
    asked = []

    class Asker(HolderAsker):
        def _ask(self, pid: int, now: float) -> None:
            asked.append((now, round(pressures[int(now) // 10], 2)))
            self.asked = now

    asker = Asker("/nowhere")
    pressures = [0.5, 0.86, 0.87, 0.86, 0.93, 0.9, 0.98, 0.99, 0.5, 0.86]
    for number, pressure in enumerate(pressures):
        asker.near_exhaustion(pressure, 1, 10.0 * number)

    assert [pressure for _, pressure in asked] == [0.86, 0.93, 0.98, 0.86]


def test_the_line_after_a_warning_of_a_gpu_names_the_tensors_there() -> None:
    variables = [
        {"name": "images", "bytes": 3 * GIB, "what": "list of 9 NumPy arrays", "place": "", "device": ""},
        {
            "name": "cache",
            "bytes": GIB,
            "what": "list of 20 tensors",
            "place": "train, a.py:3",
            "device": "cuda:0",
        },
    ]
    values = json.loads(
        json.dumps({"variables": variables, "resident": 4 * GIB, "found": 3 * GIB, "outside": GIB})
    )

    assert sentence(values, on_device=True) == (
        "Memory is held by cache (list of 20 tensors, 1.0 GiB on cuda:0) in train, a.py:3."
    )
    assert sentence(values) == (
        "Memory is held by images (list of 9 NumPy arrays, 3.0 GiB); 1.0 GiB are outside Python objects."
    )
    values |= {"children": 4, "children_bytes": 9 * GIB, "outside": None}
    assert str(sentence(values)).endswith("; 9.0 GiB are in its 4 child processes.")
    values |= {"children": 0, "found": 5 * GIB}
    assert str(sentence(values)).endswith("; some of it is shared, or not written yet.")
    assert sentence({"variables": [], "resident": GIB, "outside": None}) is None
