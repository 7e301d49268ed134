"""The machine as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.machine import host

Tree = Callable[[str], str]


def test_memory_of_a_known_machine(tree: Tree) -> None:
    memory = host.memory(tree("colab"))

    assert memory.total == 13290452 * 1024
    assert memory.available == 11000000 * 1024
    assert memory.swap_total == 0


def test_counters_of_a_known_machine(tree: Tree) -> None:
    root = tree("kaggle")

    assert host.OomReader(root).oom_kills() == 4
    assert host.MemoryReader(root).available() == 30000000 * 1024
    assert host.pressure("memory", root) == {"some": 731, "full": 210}
    assert host.pressure("io", root) is None
    assert host.steal_seconds(root) == 200 / os.sysconf("SC_CLK_TCK")
    assert host.boot_time(root) == 1790000000
    assert host.pid1_start(root) == 22
    assert host.boot_id(root) == "a475d20e-8145-42c1-8c3d-1839a6cf5d2e"


def test_the_cores_that_a_process_may_run_on_count_and_not_those_of_the_machine(tree: Tree) -> None:
    root = tree("kubernetes")

    assert host.cpu_count(root, 700) == 2
    assert host.cpu_count(root, 4_000_000) == 16  # of a process that nobody can ask


def test_this_machine_agrees_with_python() -> None:
    memory = host.memory()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")

    assert memory.total == pages
    assert memory.available is not None
    assert 0 < memory.available <= pages
    assert host.cpu_count() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("inode", "answer"), [(4026531836, True), (4026532000, False)])
def test_the_pid_namespace_is_known_by_its_inode(tmp_path: Path, inode: int, answer: bool) -> None:
    link = tmp_path / "proc/self/ns/pid"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"pid:[{inode}]")

    assert host.initial_pid_namespace(str(tmp_path)) is answer


def test_an_empty_machine_answers_none_never_0(tmp_path: Path) -> None:
    root = str(tmp_path)
    memory = host.memory(root)

    assert (memory.total, memory.available, memory.swap_total) == (None,) * 3
    assert host.OomReader(root).oom_kills() is None
    assert host.MemoryReader(root).available() is None
    assert host.steal_seconds(root) is None
    assert host.boot_id(root) is None
    assert host.boot_time(root) is None
    assert host.pid1_start(root) is None
    assert host.initial_pid_namespace(root) is None
    assert host.cpu_count(root) is None
