"""What `import buoy` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import buoy


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(buoy.__all__) == buoy.__all__ == sorted(buoy._HOMES)
    for name in buoy.__all__:
        assert getattr(buoy, name).__doc__, f"buoy.{name} has no docstring"


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
