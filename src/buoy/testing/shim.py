"""Failing a real allocator at an exact byte or an exact call, on Linux, for PyTorch and TensorFlow on the CPU.

A small C library, built on demand with the system's compiler, is preloaded into a training of its own process:

    $ python -m buoy.testing.shim -- python my_test.py

and steered from inside it:

    from buoy.testing import shim

    with shim.budget("200MiB"):
        train_one_step()                    # the allocation that crosses it is refused, as a full device would

    for number in range(1, shim.count(train_one_step) + 1):
        with shim.failing(number):          # each allocation in turn, as SQLite tests itself
            train_one_step()
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from buoy.errors import ExitCode, UsageError
from buoy.machine.files import foreign, make_folder
from buoy.units import parse_bytes

SMALLEST = 4096
"""Smaller allocations are never refused: they are not tensors of a batch."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the shim has seen."""

    live: int
    """Bytes held now in allocations of at least 1 KiB."""
    peak: int
    """The most that were held at once since `reset_peak`."""
    seen: int
    """Allocations large enough to be counted since the shim was armed."""
    refused: int


def build() -> str:
    """The path of the compiled shim; compiled at first use into the user's cache folder."""
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "the allocation shim needs Linux", received=sys.platform, expected="linux",
            hint="`buoy.testing.byte_budget` works everywhere, for PyTorch",
        )  # fmt: skip
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.c")
    with open(source, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(cache, "buoy")
    library = os.path.join(folder, f"shim-{digest}.so")
    if (what := foreign(folder)) is not None:  # what is loaded from there runs as this user
        raise UsageError(
            "the cache folder cannot be used", received=f"{folder} ({what})", expected="a folder of this user",
            hint="name another one with XDG_CACHE_HOME",
        )  # fmt: skip
    if os.path.exists(library):
        return library
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise UsageError(
            "the allocation shim needs a C compiler", received="no cc, gcc or clang on PATH",
            expected="a C compiler", hint="for example `apt-get install gcc`",
        )  # fmt: skip
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = os.path.join(scratch, "shim.so")
        command = [compiler, "-O2", "-fPIC", "-shared", "-o", made, source, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(
                "the allocation shim could not be compiled", received=done.stderr.strip()[:500],
                expected=" ".join(command[:1] + command[1:-2]), hint="is the C library's development package there?",
            )  # fmt: skip
        os.replace(made, library)  # two processes may build it at once
    return library


def environment() -> dict[str, str]:
    """This process's environment, for a child that has the shim."""
    others = os.environ.get("LD_PRELOAD", "")
    return {**os.environ, "LD_PRELOAD": f"{build()} {others}".strip()}


def loaded() -> bool:
    """Whether this process was started with the shim."""
    return hasattr(ctypes.CDLL(None), "buoy_shim_arm")


def read() -> Reading:
    """What the shim has seen so far."""
    library = _library()
    return Reading(*(int(library.buoy_shim_read(which)) for which in range(4)))


def reset_peak() -> None:
    """Start measuring the peak again, from what is held now."""
    _library().buoy_shim_reset_peak()


@contextmanager
def budget(size: int | str, *, smallest: int = SMALLEST) -> Iterator[None]:
    """Within it, an allocation that would bring the bytes held above `size` is refused."""
    with _armed(parse_bytes(size) if isinstance(size, str) else size, 0, 0, smallest):
        yield


@contextmanager
def failing(number: int, *, times: int = 1, smallest: int = SMALLEST) -> Iterator[None]:
    """Within it, the `number`-th allocation (from 1) is refused, and so are the next until it was `times`."""
    with _armed(0, number, times, smallest):
        yield


def count(function: Callable[[], object], *, smallest: int = SMALLEST) -> int:
    """How many allocations a call makes."""
    with _armed(0, 0, 0, smallest):
        function()
        return read().seen


@contextmanager
def _armed(size: int, number: int, refusals: int, smallest: int) -> Iterator[None]:
    library = _library()
    library.buoy_shim_arm(size, number, refusals, smallest)
    try:
        yield
    finally:
        library.buoy_shim_disarm()


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "buoy_shim_arm"):
        raise UsageError(
            "this process runs without the allocation shim", received="no shim in LD_PRELOAD",
            expected="a process started with it", hint="python -m buoy.testing.shim -- python my_test.py",
        )  # fmt: skip
    library.buoy_shim_arm.argtypes = [ctypes.c_long] * 4
    library.buoy_shim_read.restype = ctypes.c_long
    return library


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the command, with the shim loaded."""
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not command:
        sys.stderr.write("usage: python -m buoy.testing.shim -- COMMAND ...\n")
        return ExitCode.ERROR
    try:
        ready = environment()
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.ERROR
    program = shutil.which(command[0])
    if program is None:
        sys.stderr.write(f"error: no such command: {command[0]}\n")
        return ExitCode.NOT_FOUND
    return os.execve(program, command, ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
