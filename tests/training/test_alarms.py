"""The sidecar's forecasts, heard by the training: also by one whose recording was begun anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from buoy.flight.attempt import new_attempt
from buoy.flight.log import EventLog
from buoy.training.alarms import Alarms


def test_a_recording_that_was_begun_anew_is_heard_from_its_beginning(tmp_path: Path) -> None:
    first, second = new_attempt(str(tmp_path / "run")), new_attempt(str(tmp_path / "run"))
    EventLog(first.folder).add("start", filler="x" * 4000)
    EventLog(second.folder).add("warning", alarm="disk", text="it fills")
    recorder = SimpleNamespace(attempt=first)
    alarms = Alarms(recorder)  # type: ignore[arg-type]
    before = alarms.heard(100.0)
    recorder.attempt = None
    nowhere = alarms.heard(200.0)
    recorder.attempt = second

    assert (before, nowhere, alarms.heard(300.0), alarms.heard(400.0)) == (False, False, True, False)
