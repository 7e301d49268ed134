"""Colab's own file of kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from buoy.machine import cgroup

Tree = Callable[[str], str]


def test_only_whole_lines_since_the_start(tree: Tree) -> None:
    root = tree("colab")
    events = cgroup.ColabEvents(root)
    path = Path(root, "var/colab/events")

    assert events.readable
    assert events.read_new() == []
    with path.open("a") as file:
        file.write("1790000200,2,oom_kill=4\n1790000201,2,oom")
    assert events.read_new() == ["1790000200,2,oom_kill=4"]
    with path.open("a") as file:
        file.write("_kill=5\n")
    assert events.read_new() == ["1790000201,2,oom_kill=5"]
    path.write_text("1,2,oom_kill=1\n")
    assert events.read_new() == ["1,2,oom_kill=1"]


def test_the_file_may_appear_with_its_first_event(tree: Tree) -> None:
    root = tree("colab")
    path = Path(root, "var/colab/events")
    path.unlink()
    events = cgroup.ColabEvents(root)

    assert events.readable
    assert events.read_new() == []
    path.write_text("1790000200,2,oom_kill=1\n")
    assert events.read_new() == ["1790000200,2,oom_kill=1"]


def test_elsewhere_there_is_nothing_to_read(tmp_path: Path) -> None:
    events = cgroup.ColabEvents(str(tmp_path))

    assert events.readable is False
    assert events.read_new() == []
    assert cgroup.colab_memory_events({}, str(tmp_path)) == []


def test_the_files_are_those_the_session_names(tree: Tree) -> None:
    root = tree("colab")
    named = (
        "/sys/fs/cgroup/memory.events /var/colab/cgroup/jupyter-children/memory.events /no/such/memory.events"
    )

    assert cgroup.colab_memory_events({"CGROUP_MEMORY_EVENTS": named}, root) == [
        f"{root}/sys/fs/cgroup/memory.events",
        f"{root}/var/colab/cgroup/jupyter-children/memory.events",
    ]
    assert cgroup.colab_memory_events({"CGROUP_MEMORY_EVENTS": "/etc/passwd ../x"}, root) == []
