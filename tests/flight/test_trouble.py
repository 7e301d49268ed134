"""What buoy swallows of its own failures is written down once, and shown by `buoy why`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buoy import errors
from buoy.errors import trouble
from buoy.flight import recorder
from buoy.flight.attempt import new_attempt
from buoy.verdict.evidence import load
from buoy.verdict.judge import judge
from tests.processes import events, run_python


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("BUOY_TROUBLE", raising=False)
    recorder.join(new_attempt(str(tmp_path / "run")))
    yield tmp_path / "run"
    recorder._forget()


def test_a_swallowed_failure_is_one_event_per_place(recorded: Path) -> None:
    place = f"the live card {os.urandom(4).hex()}"
    for _ in range(3):
        trouble(place, ValueError("no such column"))
    trouble(f"{place}, another", KeyError("x"))

    written = [event for event in events(recorded) if event["kind"] == "trouble"]
    assert [event["error"] for event in written] == ["ValueError", "KeyError"]
    assert written[0]["what"] == f"{place}: ValueError: no such column"


def test_without_a_recorder_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUOY_TROUBLE", raising=False)
    errors._reported.discard("nothing")
    trouble("nothing", ValueError("no"))


def test_tests_can_make_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUOY_TROUBLE", "raise")
    with pytest.raises(ValueError, match="no such column"):
        trouble("the live card", ValueError("no such column"))


def test_the_verdict_names_it(tmp_path: Path) -> None:
    code = (
        "import sys, buoy.errors as e\ne.trouble('the live card', ValueError('no such column'))\nsys.exit(3)"
    )
    run_python(tmp_path / "run", code, env={**os.environ, "BUOY_TROUBLE": ""})
    verdict = judge(load(str(tmp_path / "run" / "attempts" / "0001")))

    assert verdict.cause.id == "exit-code"
    assert any("the live card: ValueError: no such column" in claim.text for claim in verdict.cause.cascade)
