"""What `import buoy` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import buoy


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(buoy.__all__) == buoy.__all__ == sorted(buoy._HOMES)
    for name in buoy.__all__:
        assert getattr(buoy, name).__doc__, f"buoy.{name} has no docstring"


@pytest.mark.parametrize("home", sorted(set(buoy._HOMES.values())))
def test_the_examples_of_public_names_run(home: str, tmp_path: Path) -> None:
    """In a process and a folder of their own: one of them starts to record."""
    code = (
        f"import doctest, importlib, sys; result = doctest.testmod(importlib.import_module({home!r}))\n"
        "sys.exit(1 if result.failed or not result.attempted else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )

    assert done.returncode == 0, done.stdout


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(buoy, "wtach")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_import_buoy_loads_no_third_party_module() -> None:
    assert {name.split(".")[0] for name in loaded_by("import buoy")} - set(sys.stdlib_module_names) == {
        "buoy"
    }


def test_help_loads_no_verb() -> None:
    modules = loaded_by("import buoy.cli; buoy.cli.main(['--help'])")

    assert not any(
        name.startswith(("buoy.supervisor", "buoy.verdict", "buoy.machine", "argparse")) for name in modules
    )


def test_a_live_view_loads_neither_judge_nor_writer() -> None:
    """`buoy top` is asked again and again; what it does not need would be half of its time."""
    modules = loaded_by("import buoy.view.top")

    assert not modules & {"buoy.verdict.judge", "buoy.checkpoint.saver", "logging", "socket", "ctypes"}
