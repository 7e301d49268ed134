"""The sidecar itself: clocks that jump, pauses, and a sample that fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from buoy.flight.attempt import new_attempt
from buoy.machine.files import write_json
from buoy.supervisor.sidecar import Sidecar
from tests.processes import event, events


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    """One that watches this very process, without being started."""
    attempt = new_attempt(str(tmp_path / "run"))
    write_json(
        attempt.folder + "/attempt.json", {"pid": os.getpid(), "cwd": str(tmp_path), "wall": time.time()}
    )
    return Sidecar(attempt.folder, os.getpid(), ())


def test_a_wall_clock_that_jumps_is_noted_and_sampling_goes_on(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for setting the machine's clock, which would disturb everyone on it."""
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() - 7200)
    sidecar._check_clock(time.monotonic())
    sidecar._tick(time.monotonic())

    jump = event(tmp_path / "run", "clock")
    assert jump is not None and jump["jump"] == pytest.approx(-7200, abs=1)
    assert (tmp_path / "run/attempts/0001/samples-0001.jsonl").read_text().count("\n") == 2


def test_a_pause_of_the_whole_machine_is_noted(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar._check_clock(time.monotonic() + 30)

    gap = event(tmp_path / "run", "gap")
    assert gap is not None and gap["seconds"] > 29


def test_a_failing_sample_is_told_once_and_the_watch_goes_on(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []

    def fail(now: float) -> None:
        ticks.append(now)
        raise OSError("no more descriptors")

    monkeypatch.setattr(sidecar, "_tick", fail)
    monkeypatch.setattr(sidecar, "_wait", lambda due: len(ticks) == 3)
    monkeypatch.setattr(sidecar, "_settle", lambda: None)
    sidecar.run()

    assert len(ticks) == 3
    assert (tmp_path / "run/attempts/0001/sidecar.log").read_text().count("Traceback") == 1
    assert [found["kind"] for found in events(tmp_path / "run")] == ["start"]
