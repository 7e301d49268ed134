"""The table of removed names says what was probed: here it is asked again of what is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from buoy.lint.target import removed, version_key


def test_the_table_names_its_releases_and_is_not_empty() -> None:
    for library in ("keras", "tensorflow", "numpy", "pandas", "pillow"):
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
