"""A few dozen of the mutants that `make fuzz` tries by the thousand: damage is refused in words, and costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.ground import build
from tests.fuzz.trial import KINDS, load, run_trial


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "base"
    build(folder)
    load("run")
    return folder


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_is_refused_in_words_and_nothing_is_lost(kind: str, base: Path, tmp_path: Path) -> None:
    for number in range({"run": 20, "notebook": 20}.get(kind, 8)):
        trial = run_trial(kind, base, tmp_path, f"sample {kind} {number}")

        assert trial["problems"] == [], f"{trial['seed']!r}: {trial['done']}"
