"""Room on disk, and which disks are far away."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.machine import disk

Tree = Callable[[str], str]


def test_room_here_is_what_df_says(tmp_path: Path) -> None:
    """Blocks that are kept for root are neither free nor taken: counted as taken they would fill the bar."""
    room = disk.space(str(tmp_path))
    told = subprocess.run(
        ["df", "--output=used,avail,pcent", "-B1", str(tmp_path)], capture_output=True, text=True, check=True
    )
    used, free, share = told.stdout.splitlines()[1].split()

    assert room is not None
    assert room.free == pytest.approx(int(free), rel=0.01)
    assert room.total == pytest.approx(int(used) + int(free), rel=0.01)
    assert 100 * (1 - room.free / room.total) == pytest.approx(int(share[:-1]), abs=1.5)
    assert room.source == "statvfs"


def test_kaggles_quota_replaces_what_statvfs_says(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("kaggle")
    Path(root, "kaggle/working/sub").mkdir()
    Path(root, "kaggle/working/sub/model.bin").write_bytes(os.urandom(3 << 20))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    room = disk.space("/kaggle/working/sub", root)
    outside = disk.space("/kaggle/input", root)

    assert room is not None
    assert room.total == 20 * 10**9
    assert room.free <= 20 * 10**9 - (3 << 20)
    assert "unverified" in room.source
    assert outside is not None
    assert outside.source == "statvfs"


def test_the_same_folders_elsewhere_have_no_quota(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    room = disk.space("/kaggle/working", tree("kaggle"))

    assert room is not None
    assert room.source == "statvfs"


def test_too_many_files_to_count_is_said(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("kaggle")
    for number in range(12):
        Path(root, f"kaggle/working/{number}").touch()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    monkeypatch.setattr(disk, "_MOST_FILES", 10)
    room = disk.space("/kaggle/working", root)

    assert room is not None
    assert "at most" in room.source


def test_a_missing_folder_has_no_room() -> None:
    assert disk.space("/no/such/folder") is None
    assert disk.space("\0") is None


def test_the_innermost_mount_gives_the_type(tree: Tree) -> None:
    root = tree("kaggle")

    assert disk.filesystem_type("/kaggle/working/run", root) == "ext4"
    assert disk.filesystem_type("/sys/fs/cgroup/x", root) == "cgroup2"
    assert disk.filesystem_type("/kaggle/workingplace", root) is None
    assert disk.is_remote("/kaggle/working", root) is False
    assert disk.is_remote("/content/drive/MyDrive", root) is True
    assert disk.is_remote("/kaggle/workingplace", root) is None


def test_shared_memory_is_near() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    assert disk.filesystem_type("/dev/shm") == "tmpfs"
    assert disk.is_remote("/dev/shm") is False
