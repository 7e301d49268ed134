"""Real ground for tests: file systems and memory groups made small, and taken away again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_is_recorded_after_a_test() -> Iterator[None]:
    """A test that lets buoy record the very process of the tests changes what `buoy why` says to all that follow."""
    yield
    module = sys.modules.get("buoy.flight.recorder")
    recorder = module.current() if module is not None else None
    if recorder is not None and recorder.attempt is not None:
        module._forget()  # type: ignore[union-attr]
        pytest.fail(f"this test's process is still recorded in {recorder.folder}")


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size; skips in words where that is not allowed."""
    mounts: list[Path] = []

    def make(size: str) -> Path:
        mount = tmp_path / f"disk{len(mounts)}"
        mount.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.strip()}")
        mounts.append(mount)
        return mount

    yield make
    for mount in mounts:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def make_session() -> Iterator[Callable[[int], Path]]:
    """Makes a memory cgroup (v1) of so many bytes; skips in words where that is not allowed."""
    groups: list[Path] = []

    def make(limit: int) -> Path:
        group = Path("/sys/fs/cgroup/memory") / f"buoy-test-{os.getpid()}-{len(groups)}"
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no memory cgroup (v1) can be made here: {error.strerror}")
        groups.append(group)
        (group / "memory.limit_in_bytes").write_text(str(limit))
        return group

    yield make
    for group in groups:
        group.rmdir()
