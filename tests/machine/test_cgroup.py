"""Which group counts, what it allows, what it uses: on handmade trees and on real groups of version 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buoy.machine import cgroup

GIB = 1 << 30
Tree = Callable[[str], str]


def test_the_smallest_limit_on_the_way_up_wins(tree: Tree) -> None:
    """A pod of 4 GiB holds a container of 6 GiB: the pod decides."""
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert group.version == 2
    assert group.path == "/sys/fs/cgroup/kubepods.slice/pod-a1.slice/cri-77.scope"
    assert group.limit() == 4 * GIB
    assert group.limit_path == "/sys/fs/cgroup/kubepods.slice/pod-a1.slice"
    assert group.peak() == 4 * GIB


def test_used_leaves_out_what_the_kernel_can_take_back(tree: Tree) -> None:
    """Anonymous 2 GiB, shared 0.25 GiB, kernel 20 MiB of which 12 reclaimable; the cache does not count."""
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert group.used() == 2 * GIB + GIB // 4 + (8 << 20)


def test_used_on_a_kernel_without_the_kernel_line(tree: Tree) -> None:
    group = cgroup.find(700, tree("desktop"))

    assert group is not None
    assert group.used() == 1000 + 5 + 10 + 20 + 30 + 40


def test_kills_are_counted_in_the_own_group_and_the_others_are_listed(tree: Tree) -> None:
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert group.oom_kills() == 1
    assert group.parent_oom_kills() == [
        ("/sys/fs/cgroup/kubepods.slice/pod-a1.slice", 3),
        ("/sys/fs/cgroup/kubepods.slice", 9),
    ]


def test_members_are_those_of_the_own_group_and_below(tree: Tree) -> None:
    """The neighbouring container's process 900 is not among them."""
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert sorted(group.pids() or []) == [700, 701, 702]


def test_group_kill_is_read_between_the_own_group_and_the_limit(tree: Tree) -> None:
    group = cgroup.find(700, tree("kubernetes"))
    other = cgroup.find(700, tree("namespace"))

    assert group is not None
    assert other is not None
    assert group.group_kill() is True
    assert other.group_kill() is False


def test_cpu_quota_is_the_smallest_and_throttling_is_read_where_it_is_set(tree: Tree) -> None:
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert group.cpu_quota() == 1.5
    assert group.throttled_seconds() == 2.5


def test_the_process_limit_is_that_of_the_group_with_least_room(tree: Tree) -> None:
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert group.pids_limit() == (40, 1000)


def test_pressure_is_in_microseconds(tree: Tree) -> None:
    group = cgroup.find(700, tree("kubernetes"))

    assert group is not None
    assert group.pressure() == {"some": 5000, "full": 4000}


def test_a_path_that_the_mount_does_not_show_falls_back_to_the_mount(tree: Tree) -> None:
    """Inside a cgroup namespace; pid 0 stands for a process we cannot see and must not be lost."""
    group = cgroup.find(700, tree("namespace"))

    assert group is not None
    assert (group.path, group.limit()) == ("/sys/fs/cgroup", 2 * GIB)
    assert group.pids() == [1, 700, 0]


def test_without_a_memory_controller_in_the_leaf_the_nearest_above_counts(tree: Tree) -> None:
    group = cgroup.find(700, tree("desktop"))

    assert group is not None
    assert group.path == "/sys/fs/cgroup/user.slice"
    assert (group.limit(), group.limit_path, group.peak()) == (None, None, None)
    assert group.oom_kills() == 2
    assert group.pids() == [700]


def test_colab_keeps_kernels_in_a_second_group(tree: Tree) -> None:
    """The first group says `max`; the kernel dies at the second one's limit."""
    group = cgroup.find(700, tree("colab"))

    assert group is not None
    assert group.path == "/var/colab/cgroup/jupyter-children"
    assert group.limit() == 12 * GIB
    assert group.oom_kills() == 2
    assert group.parent_oom_kills() == [("/sys/fs/cgroup", 1)]


def test_colabs_second_group_still_counts_kills_when_we_are_not_seen_in_it(tree: Tree) -> None:
    root = tree("colab")
    Path(root, "var/colab/cgroup/jupyter-children/cgroup.procs").write_text("710\n")
    group = cgroup.find(700, root)

    assert group is not None
    assert group.limit() is None
    assert ("/var/colab/cgroup/jupyter-children", 2) in group.parent_oom_kills()


def test_hybrid_takes_memory_from_version_1_and_a_limit_out_of_sight(tree: Tree) -> None:
    """The mount starts at the container; only `hierarchical_memory_limit` tells of the group above."""
    group = cgroup.find(700, tree("hybrid"))

    assert group is not None
    assert (group.version, group.path) == (1, "/sys/fs/cgroup/memory/train")
    assert (group.limit(), group.limit_path) == (8 * GIB, "/sys/fs/cgroup/memory/..")
    assert group.used() == 3 * GIB + 4096
    assert group.oom_kills() == 1
    assert group.cpu_quota() == 2.5
    assert group.throttled_seconds() == 1.5
    assert group.pids_limit() == (12, 512)


def test_a_limit_changed_while_we_watch_is_seen(tree: Tree) -> None:
    root = tree("kubernetes")
    group = cgroup.find(700, root)
    assert group is not None
    container = Path(root, "sys/fs/cgroup/kubepods.slice/pod-a1.slice/cri-77.scope")
    with (container / "memory.max").open("r+") as file:
        file.write(f"{GIB}\n")
        file.truncate()

    assert group.limit() == GIB
    assert group.limit_path == group.path
    assert GIB < (group.used() or 0) < 2 * GIB


def test_an_incomplete_list_of_members_is_no_list(tree: Tree) -> None:
    """Evidence or silence: "no foreign process" may not be concluded from what could not be read."""
    root = tree("kubernetes")
    Path(root, "sys/fs/cgroup/kubepods.slice/pod-a1.slice/cri-77.scope/init.scope/cgroup.procs").unlink()
    group = cgroup.find(700, root)

    assert group is not None
    assert group.pids() is None


def test_no_such_process_has_no_group() -> None:
    assert cgroup.find(2**22 + 1) is None


V1 = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def nested_groups() -> Iterator[Path]:
    """An inner group without a limit inside an outer one of 48 MiB, made for real."""
    outer = V1 / f"buoy-test-{os.getpid()}-{time.monotonic_ns()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text("50331648")
        if not (inner / "memory.usage_in_bytes").exists():
            raise OSError("not a cgroup")
    except OSError as error:
        for folder in (inner, outer):
            if folder.exists():
                folder.rmdir()
        pytest.skip(f"no writable version 1 memory cgroup here: {error}")
    yield inner
    for folder in (inner, outer):
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # the last process is still on its way out
                time.sleep(0.02)


def start_inside(group: Path, code: str) -> subprocess.Popen[bytes]:
    """A Python process that enters the group, says so, and then runs `code`."""
    enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); print('in', flush=True); "
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", enter + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"in\n"
    return child


def test_real_outer_limit_binds_the_inner_group(nested_groups: Path) -> None:
    child = start_inside(nested_groups, "x = bytearray(8 << 20); print('on', flush=True); input()")
    assert child.stdout is not None
    child.stdout.readline()
    group = cgroup.find(child.pid)
    try:
        assert group is not None
        assert group.path == str(nested_groups)
        assert (group.limit(), group.limit_path) == (50331648, str(nested_groups.parent))
        assert group.pids() == [child.pid]
        assert (group.used() or 0) > 8 << 20
        assert group.peak() is not None
    finally:
        child.communicate(b"\n")


def test_real_kill_counts_in_the_victims_group_though_the_outer_one_sets_the_limit(
    nested_groups: Path,
) -> None:
    """Version 1 leaves the outer group's counter alone: reading that one would say "not OOM", wrongly."""
    child = start_inside(nested_groups, "input(); x = bytearray(200 << 20)")
    group = cgroup.find(child.pid)
    assert group is not None
    before, above = group.oom_kills(), dict(group.parent_oom_kills())
    child.communicate(b"\n")

    assert child.returncode == -signal.SIGKILL
    assert before is not None
    assert (group.oom_kills() or 0) - before == 1
    assert dict(group.parent_oom_kills())[str(nested_groups.parent)] == above[str(nested_groups.parent)]
