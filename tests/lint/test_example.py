"""The line that kills our own example is found, with its fix."""

from __future__ import annotations

from pathlib import Path

import buoy

EXAMPLE = Path(__file__).parents[2] / "examples" / "leaky_training.py"


def test_the_leak_of_the_demo_is_found_before_it_runs() -> None:
    (found,) = buoy.check(str(EXAMPLE))

    line = EXAMPLE.read_text().splitlines()[found.span.line - 1]
    assert found.code == "BY401" and "history.append((loss, outputs))" in line
