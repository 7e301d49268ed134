"""Waiting for a framework's import: several may wait, while it is under way too, and nobody's import fails of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buoy.flight.imports import after_import


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; what is imported from it is forgotten again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = finders


def test_all_who_wait_are_called_once_and_the_finder_is_gone(modules: Path) -> None:
    (modules / "buoy_frame.py").write_text("value = 1\n")
    finders, told = len(sys.meta_path), []
    after_import("buoy_frame", lambda: told.append("first"))
    after_import("buoy_frame", lambda: told.append("second"))
    assert importlib.util.find_spec("buoy_frame") is not None  # only asked for: transformers does
    assert told == []
    found = importlib.import_module("buoy_frame")

    assert told == ["first", "second"] and found.value == 1
    assert len(sys.meta_path) == finders


def test_who_begins_to_wait_within_an_import_is_called_at_its_end(modules: Path) -> None:
    """`import keras` imports tensorflow, which starts a notebook's recorder, which counts keras's steps."""
    (modules / "buoy_inner.py").write_text("")
    (modules / "buoy_outer.py").write_text("import buoy_inner\ncallbacks = 1\n")
    seen: list[bool] = []

    def counts() -> None:
        seen.append(hasattr(sys.modules["buoy_outer"], "callbacks"))

    after_import("buoy_outer", lambda: None)
    after_import("buoy_inner", lambda: after_import("buoy_outer", counts))
    importlib.import_module("buoy_outer")

    assert seen == [True]


def test_a_failure_of_ours_leaves_the_import_as_it_is(
    modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "buoy_plain.py").write_text("value = 1\n")
    told: list[int] = []
    after_import("buoy_plain", lambda: told.append(1 // 0))
    after_import("buoy_plain", lambda: told.append(2))
    found = importlib.import_module("buoy_plain")

    assert found.value == 1 and told == [2]
    assert "buoy: after the import of buoy_plain: ZeroDivisionError" in capsys.readouterr().err
