"""A run folder on a file system without locks: real processes, under a C library that refuses `flock` as one does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from buoy.checkpoint.store import Store
from tests.checkpoint.ground import Array, contents, trainer

REFUSES = """
#include <errno.h>
int flock(int descriptor, int operation) { errno = ENOLCK; return -1; }
"""


@pytest.fixture(scope="module")
def without_locks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that cannot lock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to refuse locks with")
    library = tmp_path_factory.mktemp("refuses") / "refuses.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=REFUSES, text=True, check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def test_the_writer_of_a_dead_trainer_is_waited_for(tmp_path: Path, without_locks: dict[str, str]) -> None:
    code = "s = open_saver(sys.argv[1]); s.save({'a': Array(bytes(200 << 20))}, about(1), as_tensor)\n"
    killed = trainer(code + "os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path), env=without_locks)
    assert killed.wait(400) == -signal.SIGKILL
    after = trainer(
        "heard = []; open_saver(sys.argv[1], heard); print(heard)", str(tmp_path), env=without_locks
    )
    said, _ = after.communicate(timeout=400)

    assert "without locks" in said
    newest = Store(tmp_path).newest(print)
    assert newest is not None and contents(newest) == {"a": Array(bytes(200 << 20))}


def test_a_second_trainer_on_this_machine_is_told_who_is_first(
    tmp_path: Path, without_locks: dict[str, str]
) -> None:
    code = "s = open_saver(sys.argv[1]); print('open', flush=True); sys.stdin.readline()"
    first = trainer(code, str(tmp_path), env=without_locks, stdin=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == "open\n"
    second = trainer("open_saver(sys.argv[1])", str(tmp_path), env=without_locks, stderr=subprocess.PIPE)
    _, trouble = second.communicate(timeout=400)
    first.communicate("\n", timeout=400)

    assert second.returncode != 0
    assert f"process {first.pid} on" in trouble
