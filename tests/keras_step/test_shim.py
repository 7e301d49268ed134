"""The allocation shim, on the C library's own functions: no framework needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.errors import UsageError
from buoy.testing import shim

ALLOCATE = """
import ctypes
from buoy.testing import shim
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]
def allocate(size, alignment=64):
    pointer = ctypes.c_void_p()
    failed = libc.posix_memalign(ctypes.byref(pointer), ctypes.c_size_t(alignment), ctypes.c_size_t(size))
    return None if failed else pointer
"""


def shimmed(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "buoy.testing.shim", "--", sys.executable, "-c", ALLOCATE + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def test_a_budget_refuses_exactly_what_would_cross_it() -> None:
    done = shimmed("""
with shim.budget(shim.read().live + 100_000):
    first = allocate(60_000)
    print(first is not None, allocate(60_000) is None, allocate(40_000) is not None)
    libc.free(first)
    print(allocate(60_000) is not None, shim.read().refused)
""")

    assert done.stdout.split("\n")[:2] == ["True True True", "True 1"], done.stderr


def test_the_nth_allocation_is_refused_and_no_other() -> None:
    done = shimmed("""
print(shim.count(lambda: [allocate(8192) for _ in range(5)]))
with shim.failing(3):
    print([allocate(8192) is None for _ in range(5)])
with shim.failing(2, times=2):
    print([allocate(8192) is None for _ in range(5)])
print(allocate(8192) is None)
""")

    assert done.stdout.splitlines() == [
        "5",
        "[False, False, True, False, False]",
        "[False, True, True, False, False]",
        "False",
    ], done.stderr


def test_small_and_page_aligned_allocations_are_let_through() -> None:
    done = shimmed("""
with shim.failing(1, times=100, smallest=4096):
    print(allocate(4095) is None, allocate(8192, alignment=4096) is None, allocate(4096) is None)
""")

    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_live_bytes_and_peak_are_the_truth() -> None:
    done = shimmed("""
shim.reset_peak()
before = shim.read()
pointers = [allocate(50_000) for _ in range(4)]
for pointer in pointers: libc.free(pointer)
after = shim.read()
print(after.peak - before.live, after.live - before.live)
""")

    assert done.stdout.split() == ["200000", "0"], done.stderr


def test_without_the_shim_it_says_how_to_get_it() -> None:
    assert not shim.loaded()
    with pytest.raises(UsageError, match=r"python -m buoy\.testing\.shim"):
        shim.read()


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CC", None)
    command = [sys.executable, "-m", "buoy.testing.shim", "--", sys.executable, "-c", "pass"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)

    assert done.returncode == 2
    assert "C compiler" in done.stderr and "hint" in done.stderr


def test_it_is_built_once_and_runs_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    code = "import sys; from buoy.testing import shim; sys.exit(7 if shim.loaded() else 1)"
    command = [sys.executable, "-m", "buoy.testing.shim", "--", sys.executable, "-c", code]
    codes = [subprocess.run(command, env=environment, timeout=400, check=False).returncode for _ in range(2)]

    assert codes == [7, 7]
    assert len(list((tmp_path / "buoy").glob("shim-*.so"))) == 1
