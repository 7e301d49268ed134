"""Which platform this is, and what its row says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.errors import UsageError
from buoy.machine import limits, platforms
from buoy.machine import limits as clock

Tree = Callable[[str], str]
GIB = 1 << 30
COLAB = {"COLAB_RELEASE_TAG": "release-colab_20261101", "COLAB_GPU": ""}


def detected(environ: dict[str, str], root: str, gpus: list[str] | None = None) -> str | None:
    row = platforms.detect(environ, root, gpus)
    return None if row is None else row.id


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], "colab-cpu"),
        (["Tesla T4"], "colab-t4"),
        (["NVIDIA L4"], "colab-l4"),
        (["NVIDIA A100-SXM4-40GB"], "colab-a100"),
        (["NVIDIA A100-SXM4-80GB"], "colab-a100-80"),
        (["NVIDIA H100 80GB HBM3"], "colab-h100"),
        (["NVIDIA RTX PRO 6000 Blackwell Server Edition"], "colab-g4"),
        (["NVIDIA L40S"], None),
    ],
)
def test_the_gpu_decides_colabs_tier(tree: Tree, gpus: list[str], expected: str | None) -> None:
    """An unknown GPU is no reason to guess."""
    assert detected(COLAB, tree("colab"), gpus) == expected


def test_the_same_gpu_with_more_memory_is_the_high_ram_tier(tree: Tree) -> None:
    assert detected(COLAB, tree("hybrid"), ["Tesla T4"]) == "colab-t4-highram"


def test_an_empty_colab_gpu_is_no_gpu_and_a_set_one_is_not_called_cpu(tree: Tree) -> None:
    assert detected(COLAB, tree("desktop"), []) == "colab-cpu"
    assert detected({**COLAB, "COLAB_GPU": "1"}, tree("hybrid"), []) is None


def test_the_driver_tells_when_nobody_else_does(tree: Tree) -> None:
    assert detected(COLAB, tree("colab")) == "colab-t4"


def test_kaggle_is_recognised_before_colab(tree: Tree) -> None:
    assert detected({**COLAB, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}, tree("kaggle")) == "kaggle-t4x2"


@pytest.mark.parametrize(
    ("environ", "gpus", "expected"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, ["Tesla P100-PCIE-16GB"], "kaggle-p100"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, [], "kaggle-cpu"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_WORKER_ID": "0"}, [], "kaggle-tpu-v5e8"),
        ({**COLAB, "VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, [], "colab-enterprise"),
        ({**COLAB, "COLAB_TPU_1VM": "1"}, [], "colab-tpu-v5e1"),
        ({"SPACE_ID": "me/app"}, [], "spaces-cpu"),
        ({"SPACE_ID": "me/app"}, ["NVIDIA A10G"], "spaces-a10g"),
        ({"LIGHTNING_CLOUD_SPACE_ID": "1"}, [], "lightning-cpu"),
        ({"LIGHTNING_CLOUD_SPACE_ID": "1"}, ["Tesla T4"], None),
        ({"PAPERSPACE_CLUSTER_ID": "1"}, ["Quadro M4000"], "paperspace-free"),
        ({"PAPERSPACE_CLUSTER_ID": "1"}, ["NVIDIA A100-SXM4-80GB"], None),
        ({}, ["Tesla T4"], None),
    ],
)
def test_other_platforms(tree: Tree, environ: dict[str, str], gpus: list[str], expected: str | None) -> None:
    assert detected(environ, tree("desktop"), gpus) == expected


def test_studio_lab_is_known_by_its_home(tmp_path: Path) -> None:
    (tmp_path / "home/studio-lab-user").mkdir(parents=True)

    assert detected({}, str(tmp_path), ["Tesla T4"]) == "studiolab-t4"


def test_slurm_gives_the_jobs_own_limit(tree: Tree) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1790000000", "SLURM_JOB_END_TIME": "1790043200"}
    row = platforms.detect(job, tree("desktop"), [])

    assert row is not None
    assert row.max_runtime == platforms.Quantity(43200.0, verified=True)
    assert row.cite(row.max_runtime) == "platform slurm, SLURM_JOB_END_TIME less SLURM_JOB_START_TIME"
    assert clock.session_started(tree("desktop"), job) == 1790000000


def test_slurm_without_an_end_has_no_limit(tree: Tree) -> None:
    row = platforms.detect({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "soon"}, tree("desktop"), [])

    assert row is not None
    assert row.max_runtime is None


def test_every_row_is_dated_and_sourced() -> None:
    rows = platforms.all_platforms()

    assert len({row.id for row in rows}) == len(rows)
    assert len(rows) >= 20
    for row in rows:
        assert row.id
        assert row.source, row.id
        assert row.date[:2] == "20", row.id
        assert row.confidence, row.id
        assert (row.max_runtime is None) == (row.max_runtime_source == ""), row.id


def test_unverified_values_say_so() -> None:
    """Nobody has measured Colab's twelve hours; its memory was read in a session."""
    row = platforms.by_id("colab-t4")

    assert row.ram is not None
    assert row.ram.verified
    assert row.max_runtime is not None
    assert not row.max_runtime.verified
    assert row.cite(row.max_runtime).endswith(", unverified")
    assert "unverified" not in row.cite(row.ram)


def test_an_unknown_id_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        platforms.by_id("colab-t5")

    assert caught.value.received == "'colab-t5'"
    assert caught.value.hint is not None
    assert "`colab-t4`" in caught.value.hint
    assert "kaggle-p100" in str(caught.value.expected)


def test_limits_come_from_the_machine_first(tree: Tree) -> None:
    found = limits.read(700, "/kaggle/working", COLAB, tree("colab"))

    assert found.ram == 12 * GIB
    assert found.ram_source == "cgroup /var/colab/cgroup/jupyter-children"
    assert found.platform == "colab-t4"
    assert found.time_limit == 12 * 3600
    assert str(found.time_limit_source).endswith("unverified")


def test_where_the_machine_is_silent_the_row_speaks_and_says_so(tmp_path: Path) -> None:
    found = limits.read(700, "/nowhere", {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, str(tmp_path))
    row = platforms.by_id("kaggle-cpu")

    assert row.ram is not None
    assert found.ram == row.ram.value
    assert found.ram_source == "platform kaggle-cpu, third-party 2025-11-21, unverified"
    assert found.cpus == 4
    assert (found.swap, found.shm, found.cpu_quota) == (None, None, None)


def test_gpus_of_the_row_stand_in_for_nvml(tree: Tree) -> None:
    found = limits.read(700, "/", {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, tree("kaggle"))

    assert [device["total"] for device in found.gpus] == [15 * GIB, 15 * GIB]
    assert "platform kaggle-t4x2" in found.gpus[0]["source"]


def test_a_group_that_allows_more_than_the_machine_has_is_no_limit(tree: Tree) -> None:
    root = tree("namespace")
    Path(root, "sys/fs/cgroup/memory.max").write_text(f"{999 * GIB}\n")
    found = limits.read(700, "/", {}, root)

    assert (found.ram, found.ram_source, found.cgroup_path) == (131072000 * 1024, "/proc/meminfo", None)


def test_limits_of_this_machine_are_plain_values(tmp_path: Path) -> None:
    import json

    found = limits.read(folder=str(tmp_path), environ={})
    again = json.loads(json.dumps(found.to_json()))

    assert again["ram"] == found.ram
    assert found.ram
    assert found.cpus
    assert found.disk
    assert found.platform is None
    assert found.time_limit is None


def test_a_session_is_as_old_as_pid_1_on_a_platform_and_as_this_process_elsewhere(tree: Tree) -> None:
    import os

    root, ticks = tree("colab"), os.sysconf("SC_CLK_TCK")

    assert clock.session_started(root, COLAB) == 1790000000 + 22 / ticks
    assert clock.session_started(root, {}) == 1790000000 + 6000 / ticks
    assert clock.session_started("/no/such/root", {}) is None


def test_this_session_began_before_now() -> None:
    began = clock.session_started(environ={})

    assert began is not None
    assert 0 < time.time() - began < 86400
