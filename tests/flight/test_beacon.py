"""The beacon: what a process says is what a reader sees, also after its death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.flight.beacon import SIZE, Beacon, parse, read_beacon
from buoy.flight.recorder import Recorder


def test_steps_phases_epochs_and_cells_are_read_back(tmp_path: Path) -> None:
    beacon = Beacon(str(tmp_path / "beacon"))
    beacon.step()
    beacon.step()
    beacon.epoch(3)
    beacon.cell("In [7]")
    left = beacon.phase("eval")

    seen = read_beacon(str(tmp_path / "beacon"))
    assert seen is not None
    assert (seen.step, seen.epoch, seen.phase, seen.cell, left) == (2, 3, "eval", "In [7]", "train")
    assert seen.step_seconds is not None and seen.step_seconds > 0


def test_before_the_first_step_nothing_is_claimed(tmp_path: Path) -> None:
    Beacon(str(tmp_path / "beacon"))

    seen = read_beacon(str(tmp_path / "beacon"))
    assert seen is not None
    assert (seen.step, seen.step_t, seen.step_seconds, seen.epoch, seen.note) == (0, None, None, None, None)


def test_the_beacon_outlives_sigkill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from buoy.flight.beacon import Beacon; b = Beacon(sys.argv[1])\n"
        "for _ in range(41): b.step()\n"
        "b.note({'kind': 'test'}); b.step(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "beacon")], check=False)

    seen = read_beacon(str(tmp_path / "beacon"))
    assert seen is not None and seen.step == 42 and seen.note == {"kind": "test"}


def test_a_note_too_long_for_the_page_is_cut_and_still_parses(tmp_path: Path) -> None:
    beacon = Beacon(str(tmp_path / "beacon"))
    beacon.note({"kind": "exception", "message": "ä" * 50_000, "chain": [{"message": "x" * 2000}] * 4})

    seen = beacon.read()
    assert seen is not None and seen.note is not None
    assert seen.note["kind"] == "exception" and " ... " in seen.note["message"]


def test_a_symlink_in_its_place_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "victim"
    target.write_text("precious")
    (tmp_path / "beacon").symlink_to(target)

    with pytest.raises(FileExistsError):
        Beacon(str(tmp_path / "beacon"))
    assert target.read_text() == "precious"


def test_foreign_bytes_are_no_beacon() -> None:
    assert parse(b"") is None
    assert parse(os.urandom(SIZE)) is None
    # Ours, with nonsense in it: read, not trusted.
    assert parse(b"BUOYBCN1" + b"\xff" * (SIZE - 8)) is not None
    assert read_beacon("/nonexistent") is None


def test_a_pause_between_two_cells_is_no_part_of_a_steps_time(tmp_path: Path) -> None:
    beacon = Beacon(str(tmp_path / "beacon"))
    for _ in range(5):
        beacon.step()
    before = beacon.read()
    beacon.phase("done")
    beacon.phase("train")
    beacon.step()
    after = beacon.read()

    assert before is not None and after is not None and after.step == 6
    assert after.step_seconds == before.step_seconds


def test_another_training_begins_with_its_own_count_and_has_done_no_step_yet(tmp_path: Path) -> None:
    beacon = Beacon(str(tmp_path / "beacon"))
    beacon.step()
    before = beacon.read()
    beacon.at(40)
    begun = beacon.read()
    beacon.step()
    stepped = beacon.read()

    assert before is not None and begun is not None and stepped is not None
    assert (begun.step, begun.step_t) == (40, before.step_t)
    assert stepped.step == 41


def test_after_a_training_is_over_no_step_is_expected() -> None:
    """What comes then (a test, an upload, a plan) is as unknown as what came before the first step."""
    recorder = Recorder(None)
    recorder.trains("runs/cats", 0)
    recorder.step()
    trains = recorder.beacon.read().phase
    recorder.trained("runs/cats", 1, True)
    over = recorder.beacon.read().phase
    recorder.step()

    assert (trains, over, recorder.beacon.read().phase) == ("train", "start", "train")


def test_a_batch_that_was_handed_out_is_seen_before_the_next_step(tmp_path: Path) -> None:
    beacon = Beacon(str(tmp_path / "beacon"))
    beacon.step()
    beacon.waited(0.25)

    reading = read_beacon(str(tmp_path / "beacon"))
    assert reading is not None and (reading.step, reading.data_wait) == (1, 0.25)


@pytest.mark.parametrize(
    "note", ["[" * 1400 + "]" * 1400, '{"a":' * 500 + "1" + "}" * 500, '{"kind": NaN}', "{"]
)
def test_a_note_that_nobody_wrote_is_read_all_the_same(note: str, tmp_path: Path) -> None:
    beacon = Beacon(str(tmp_path / "beacon"))
    beacon.step(7)
    beacon._text(1024, 3068, note)

    read = read_beacon(str(tmp_path / "beacon"))

    assert read is not None and read.step == 7
    json.dumps(read.note, allow_nan=False)
