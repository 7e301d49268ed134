"""The sidecar's forecasts, heard by the training: also by one whose recording was begun anew."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from buoy.flight.attempt import new_attempt
from buoy.flight.log import EventLog
from buoy.training.save_policy import Alarms, Cost


def test_a_recording_that_was_begun_anew_is_heard_from_its_beginning(tmp_path: Path) -> None:
    first, second = new_attempt(str(tmp_path / "run")), new_attempt(str(tmp_path / "run"))
    EventLog(first.folder).add("start", filler="x" * 4000)
    EventLog(second.folder).add("warning", alarm="disk", text="it fills")
    recorder = SimpleNamespace(attempt=first)
    alarms = Alarms(recorder)  # type: ignore[arg-type]
    before = alarms.due(100.0, None, None)
    recorder.attempt = None
    nowhere = alarms.due(200.0, None, None)
    recorder.attempt = second

    told = alarms.due(300.0, None, None)
    assert (before, nowhere, told, alarms.due(400.0, None, None)) == (False, False, True, False)


def _saves(alarms: Alarms, cost: Cost, until: int) -> list[int]:
    """The seconds at which a training that looks every second saves."""
    saved: list[int] = []
    for now in range(until):
        if alarms.due(float(now), float(saved[-1]) if saved else None, cost):
            saved.append(now)
    return saved


def test_before_a_foretold_end_it_saves_again_whenever_the_time_left_has_halved(tmp_path: Path) -> None:
    attempt = new_attempt(str(tmp_path / "run"))
    EventLog(attempt.folder).add("warning", alarm="ram", text="it fills", values={"seconds": 80.0})
    saved = _saves(Alarms(SimpleNamespace(attempt=attempt)), Cost(0.01, 0.0, 0.2), 600)  # type: ignore[arg-type]
    before, after = [at for at in saved if at <= 80], [at for at in saved if at > 80]

    assert before[:3] == [0, 40, 60] and 80 - before[-1] <= 3
    assert len(before) <= 12
    assert after[-1] <= 160 and len(after) <= 10  # it did not come: less and less often, and then no more


def test_what_is_dear_to_save_is_not_saved_every_second(tmp_path: Path) -> None:
    attempt = new_attempt(str(tmp_path / "run"))
    EventLog(attempt.folder).add("warning", alarm="vram", text="it fills", values={"seconds": 80.0})
    saved = _saves(Alarms(SimpleNamespace(attempt=attempt)), Cost(1.0, 1.0, 5.0), 100)  # type: ignore[arg-type]

    assert min(later - earlier for earlier, later in pairwise(saved)) >= 20


@pytest.mark.parametrize("alarm", ["disk", "ram-level"])
def test_a_disk_that_fills_or_ram_that_just_stands_there_is_one_save(tmp_path: Path, alarm: str) -> None:
    """More writes fill the disk; and nobody has said when that RAM will be full."""
    attempt = new_attempt(str(tmp_path / "run"))
    EventLog(attempt.folder).add("warning", alarm=alarm, text="it fills", values={"seconds": 80.0})

    assert _saves(Alarms(SimpleNamespace(attempt=attempt)), Cost(0.01, 0.0, 0.2), 300) == [0]  # type: ignore[arg-type]
