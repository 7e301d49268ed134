"""NVML through ctypes, against a small library that stands in for the driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.machine import gpu

Tree = Callable[[str], str]


def build(folder: Path, source: str) -> str:
    """A shared library from C; skips, saying so, without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to build the library that stands in for NVML")
    (folder / "nvml.c").write_text(source)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return str(library)


@pytest.fixture
def library(tmp_path: Path) -> str:
    return build(tmp_path, (Path(__file__).parent / "fake_nvml.c").read_text())


def test_devices_and_what_they_do_not_tell(library: str) -> None:
    nvml = gpu.open_nvml(library)

    assert nvml is not None
    assert nvml.devices() == [
        {"index": 0, "name": "Tesla T4", "total": 16106127360, "used": 5 << 30, "util": 83},
        {"index": 1, "name": "Tesla T4", "total": 16106127360, "used": 0, "util": None},
    ]


def test_a_closed_library_answers_with_nothing(library: str) -> None:
    nvml = gpu.open_nvml(library)
    assert nvml is not None
    nvml.close()

    assert nvml.devices() == []
    nvml.close()


def test_a_driver_that_does_not_start_is_no_driver(tmp_path: Path) -> None:
    """As after a driver update without a reboot: NVML_ERROR_LIB_RM_VERSION_MISMATCH."""
    assert gpu.open_nvml(build(tmp_path, "int nvmlInit_v2(void) { return 18; }")) is None


def test_a_library_without_the_functions_we_know_is_no_driver(tmp_path: Path) -> None:
    assert gpu.open_nvml(build(tmp_path, "int other(void) { return 0; }")) is None


def test_no_driver_no_answer(tmp_path: Path) -> None:
    assert gpu.open_nvml(str(tmp_path / "none.so")) is None


def test_model_names_are_also_in_proc(tree: Tree) -> None:
    assert gpu.driver_names(tree("kaggle")) == ["Tesla T4", "Tesla T4"]
    assert gpu.driver_names(tree("desktop")) == []
