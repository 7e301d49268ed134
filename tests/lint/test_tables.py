"""The table of removed names says what was probed: here it is asked again of what is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from buoy.lint.target import removed, version_key


def test_the_table_names_its_releases_and_is_not_empty() -> None:
    for library in ("keras", "tensorflow", "numpy", "pandas", "pillow", "torch"):
        rows = removed()[library]

        assert len(rows["names"]) > 20
        assert all(version_key(since) <= version_key(rows["version"]) for since in rows["names"].values())


def test_what_the_table_calls_gone_is_gone_from_the_numpy_installed_here() -> None:
    try:
        installed = version_key(metadata.version("numpy"))
    except metadata.PackageNotFoundError:
        pytest.skip("numpy is not installed here")
    gone = [name for name, since in removed()["numpy"]["names"].items() if installed >= version_key(since)]
    code = "import numpy, sys; print(*[name for name in sys.argv[1:] if hasattr(numpy, name.split('.')[1])])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *gone], capture_output=True, text=True, check=True
    )

    assert len(gone) > 50
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "name",
    [
        "keras.utils.np_utils",
        "keras.layers.convolutional",
        "keras.layers.experimental",
        "keras.wrappers.scikit_learn",
    ],
)
def test_the_removals_that_cost_most_are_in_it(name: str) -> None:
    """Those that public notebooks use most; `ImageDataGenerator` is gone from `keras` and still there in `tf.keras`."""
    names = removed()["keras"]["names"]

    assert name in names or f"tensorflow.{name}" in names
    assert "keras.preprocessing.image.ImageDataGenerator" in names
    assert "tensorflow.keras.preprocessing.image.ImageDataGenerator" not in names


def test_what_the_table_calls_gone_is_gone_from_the_torch_installed_here() -> None:
    """One start of torch asks for every top-level name and every argument."""
    pytest.importorskip("torch", reason="torch is not installed here")
    rows = removed()["torch"]
    names = [name for name in rows["names"] if name.count(".") == 1 and name not in rows["raising"]]
    code = """
import importlib, inspect, sys, torch
from torch.optim import lr_scheduler
print(*[name for name in sys.argv[1].split() if hasattr(torch, name.split('.')[1])])
print(*[name for name in sys.argv[2].split() if 'verbose' in inspect.signature(getattr(lr_scheduler, name)).parameters])
for name in sys.argv[3].split():
    try:
        getattr(torch, name.split('.')[1])(torch.eye(2))
    except TypeError:
        getattr(torch, name.split('.')[1])(torch.eye(2), torch.eye(2))
    except RuntimeError as error:
        assert 'removed' in str(error), error
        continue
    print(name)
"""
    schedulers = [owner.rpartition(".")[2] for owner in rows["keywords"] if "lr_scheduler" in owner]
    installed = version_key(metadata.version("torch"))
    if installed < (2, 7):
        pytest.skip("this torch still has them")
    lists = [" ".join(part) for part in (names, schedulers, ["torch.symeig", "torch.matrix_rank"])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *lists], capture_output=True, text=True, check=True
    )

    assert len(names) > 10 and len(schedulers) > 10
    assert done.stdout.split() == []
