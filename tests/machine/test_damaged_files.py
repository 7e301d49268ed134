"""Random bytes in every file of every tree: readings become None, nothing raises."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.machine import cgroup, disk, gpu, host, kernel_log, limits, platforms, procfs, threads
from buoy.machine import limits as clock

Tree = Callable[[str], str]
TREES = ["kubernetes", "namespace", "desktop", "colab", "kaggle", "hybrid"]
COLAB = {"COLAB_RELEASE_TAG": "x"}


def read_everything(root: str) -> None:
    """Every reading there is; each may be None, none may raise."""
    procfs.descendants(700, root)
    procfs.process_name(700, root)
    procfs.cpu_limits(700, root)
    procfs.io_bytes(700, root)
    procfs.handles_signal(700, 15, root)
    threads.Activity(threads.Look(1.0, [700], 700, root), threads.Look(2.0, [700], 700, root))
    procfs.zombie_status(700, root)
    procfs.process_memory(700, root)
    reader = procfs.ProcessReader(700, root)
    reader.stat()
    reader.rss()
    reader.close()
    group = cgroup.find(700, root)
    if group is not None:
        for reading in (
            group.limit, group.used, group.peak, group.oom_kills, group.parent_oom_kills,
            group.group_kill, group.pids, group.pressure, group.cpu_quota, group.throttled_seconds,
            group.pids_limit,
        ):  # fmt: skip
            reading()
        group.close()
    for host_reading in (
        host.memory, host.steal_seconds, host.cpu_count, host.boot_id, host.pid1_start,
        host.boot_time, host.initial_pid_namespace,
    ):  # fmt: skip
        host_reading(root)
    host.pressure("memory", root)
    disk.space("/kaggle/working", root)
    disk.is_remote("/kaggle/working", root)
    gpu.driver_names(root)
    cgroup.ColabEvents(root).read_new()
    log = kernel_log.KernelLog(f"{root}/kmsg")
    log.close()
    platforms.detect(COLAB, root)
    clock.session_started(root, COLAB)
    limits.read(700, "/kaggle/working", COLAB, root)


def damage(data: bytes, chance: random.Random) -> bytes:
    """Noise, a cut, a flipped byte, absurd numbers, or nothing at all."""
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(300))
    if kind == 1:
        return data[: chance.randrange(len(data) + 1)]
    if kind == 2 and data:
        at = chance.randrange(len(data))
        return data[:at] + chance.randbytes(1) + data[at + 1 :]
    if kind == 3:
        number = chance.choice([b"-1", b"9" * 60, b"9" * 400, b"0", b"\xd9\xa3", b"1e9", b"nan"])
        return b" ".join(number if word.isdigit() else word for word in data.split(b" "))
    return b""


@pytest.mark.parametrize("name", TREES)
def test_no_reading_raises_whatever_the_files_hold(tree: Tree, name: str) -> None:
    root = tree(name)
    files = {path: path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}
    read_everything(root)
    for seed in range(25):
        chance = random.Random(f"{name} {seed}")
        for path, data in files.items():
            path.write_bytes(damage(data, chance) if chance.random() < 0.5 else data)
        read_everything(root)


def test_kernel_log_noise_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = kernel_log.KernelLog(str(path))
    chance = random.Random(1)
    with path.open("ab") as file:
        for _ in range(300):
            file.write(damage(b"4,1,1000000,-;oom-kill:constraint=A,task=b,pid=1,uid=0\n", chance) + b"\n")
    for line in log.read_new():
        for parse in (kernel_log.parse_oom_kill, kernel_log.parse_segfault, kernel_log.parse_xid):
            parse(str(line["text"]))
        assert str(line["text"]).isprintable()
    log.close()
