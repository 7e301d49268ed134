"""Folders that are torn, copied, damaged or idle: what the list, `top` and the report say of them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint.store import Store
from buoy.cli import main
from buoy.flight.attempt import find_attempt, new_attempt, point_to
from buoy.flight.log import FIELDS, SampleLog
from buoy.machine import host
from buoy.machine.files import write_json
from buoy.view import history, report, runs
from buoy.view.top import lines, state
from tests.view.folders import make_attempt

Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What a verb prints."""

    def run(*words: str) -> str:
        main(list(words))
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def in_the_list(shown: Shown, folder: Path) -> dict[str, Any]:
    (run,) = json.loads(shown("runs", str(folder), "--format", "json"))["runs"]
    assert isinstance(run, dict)
    return run


def test_a_log_that_stops_without_an_end_is_not_running_however_new_its_files_are(
    tmp_path: Path, shown: Shown
) -> None:
    make_attempt(tmp_path / "cats", 30.0, dies_of=None)
    page = report.page(history.read(str(tmp_path / "cats")))

    assert in_the_list(shown, tmp_path)["status"] != "running"
    assert not in_the_list(shown, tmp_path)["alive"]
    assert "still running" not in page
    assert "its end: the log stops without one" in page
    assert "running" not in shown("top", str(tmp_path / "cats"), "--once")


def _torn(path: Path) -> None:
    path.write_text('{"schema": "buoy.ru')


def _empty(path: Path) -> None:
    path.write_text("")


def _missing(path: Path) -> None:
    path.unlink()


def _unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_torn, _empty, _missing, _unreadable])
def test_a_damaged_run_json_hides_no_run_and_the_name_in_the_list_is_taken_by_every_verb(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    make_attempt(tmp_path / "runs" / "Cats and dogs", 5.0)
    damage(tmp_path / "runs" / "Cats and dogs" / "run.json")
    monkeypatch.chdir(tmp_path)
    _, row, note = shown("runs").splitlines()
    name = shlex.split(row)[0]

    assert name == "runs/Cats and dogs"
    assert "run.json " in note
    assert "Cats and dogs" in shown("why", name)
    assert shown("top", name, "--once").startswith("Cats and dogs #1: kernel-oom")
    assert "wrote" in shown("report", name)
    assert "run.json " in (tmp_path / "runs" / "Cats and dogs" / "report.html").read_text()
    assert "removed" in shown("runs", "rm", name, "--yes")
    assert not (tmp_path / "runs" / "Cats and dogs").exists()


def test_a_bare_name_is_looked_for_in_runs(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_attempt(tmp_path / "runs" / "cats", 5.0)
    monkeypatch.chdir(tmp_path)

    assert "cats" in shown("why", "cats")
    assert "removed" in shown("runs", "rm", "cats", "--yes")


def test_a_folder_of_somebody_elses_attempts_is_no_run(tmp_path: Path, shown: Shown) -> None:
    (tmp_path / "thesis" / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "thesis" / "attempts" / "0001" / "notes.txt").write_text("mine")

    assert "no run in" in shown("runs", str(tmp_path))
    assert "nothing was removed" in shown("runs", "rm", str(tmp_path / "thesis"), "--yes")


def test_where_no_attempt_can_be_read_nothing_is_known_of_them(tmp_path: Path, shown: Shown) -> None:
    make_attempt(tmp_path / "cats", 5.0)
    (tmp_path / "cats" / "attempts").rename(tmp_path / "elsewhere")
    (tmp_path / "cats" / "attempts").write_text("no folder")
    listed = in_the_list(shown, tmp_path)

    assert (listed["status"], listed["attempts"]) == ("not known", None)
    assert "attempts cannot be read (Not a directory)" in shown("why", str(tmp_path / "cats"))


def test_an_attempt_that_cannot_be_read_was_seen_at_no_known_time(tmp_path: Path, shown: Shown) -> None:
    make_attempt(tmp_path / "cats", 5.0)
    os.symlink(tmp_path / "gone", tmp_path / "cats" / "attempts" / "0002")

    assert in_the_list(shown, tmp_path)["touched"] is None
    assert shown("runs", str(tmp_path)).splitlines()[1].endswith("n/a")
    assert in_the_list(shown, tmp_path)["missing"] == ["attempt.json of attempt 2 cannot be read"]


def _recorded(tmp_path: Path, phases: list[tuple[str, float, float]], **about: Any) -> Path:
    """A kernel of this very process: phases as (name, seconds, steps a second)."""
    attempt = new_attempt(str(tmp_path / "notebook"))
    seconds = sum(length for _, length, _ in phases)
    start, wall = time.monotonic() - seconds, time.time() - seconds
    write_json(
        os.path.join(attempt.folder, "attempt.json"),
        {"number": 1, "pid": os.getpid(), "t": start, "wall": wall, "boot_id": host.boot_id(),
         "hostname": host.hostname(), "command": ["python", "ipykernel_launcher.py"], **about},
    )  # fmt: skip
    log = SampleLog(attempt.folder)
    moment, step = 0.0, 0.0
    for phase, length, rate in phases:
        end = moment + length
        while moment < end:
            row = {
                "t": start + moment,
                "wall": wall + moment,
                "step": int(step),
                "phase": phase,
                "rss": 1 << 20,
            }
            log.add([row.get(name) for name in FIELDS])
            moment, step = moment + 0.2, step + rate * 0.2
    return tmp_path / "notebook"


def test_pauses_between_cells_and_what_a_cell_does_before_its_first_step_are_no_step_time(
    tmp_path: Path,
) -> None:
    cells = [("train", 12.0, 4.0), ("done", 300.0, 0.0), ("train", 60.0, 0.0), ("train", 12.0, 4.0)]
    run = _recorded(tmp_path, cells)
    measured = history.read_life(find_attempt(str(run))).series["step_seconds"]

    assert len(measured) >= 6
    # A stretch of 2 s may end one sample late, by 0.2 s: that depends on the clock's last bits.
    assert all(low == pytest.approx(0.25, rel=0.11) for _, low, _ in measured)
    assert state(find_attempt(str(run)))["step_seconds"] == pytest.approx(0.25, rel=0.1)


def test_a_fresh_kernel_is_idle_and_has_done_no_step(tmp_path: Path) -> None:
    text = lines(state(find_attempt(str(_recorded(tmp_path, [("done", 4.0, 0.0)])))))

    assert text[0].startswith("notebook #1: idle")
    assert text[1] == "no step yet"


def test_without_a_sample_no_time_is_told(tmp_path: Path) -> None:
    now = state(find_attempt(str(_recorded(tmp_path, []))))

    assert now["seconds"] is None
    assert lines(now)[0] == "notebook #1: no sample yet"


def test_a_finished_run_whose_log_lost_that_is_told_by_its_checkpoint(tmp_path: Path, shown: Shown) -> None:
    """Recorded by a kernel that was killed later; the events of its own training are gone."""
    make_attempt(tmp_path / "notebook", 5.0, dies_of="killed")
    run = tmp_path / "cats"
    point_to(str(run), find_attempt(str(tmp_path / "notebook")))
    saver = Store(str(run)).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, {"step": 7, "finished": True}, lambda value: None, wait=True)
    saver.close()
    runs = {run["name"]: run for run in json.loads(shown("runs", str(tmp_path), "--format", "json"))["runs"]}

    assert (runs["cats"]["status"], runs["cats"]["step"]) == ("finished", 7)
    assert runs["notebook"]["status"] == "killed"


def _save(run: Path, step: int) -> None:
    saver = Store(str(run)).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, {"step": step}, lambda value: None, wait=True)
    saver.close()


def test_checkpoints_without_a_run_json_are_listed_with_what_is_missing(tmp_path: Path, shown: Shown) -> None:
    """As they lie in a run folder that was copied in part: they are all there is to go on from."""
    _save(tmp_path / "cats", 7)
    (tmp_path / "cats" / "run.json").unlink(missing_ok=True)
    (tmp_path / "theirs" / "checkpoints" / "step-000000007").mkdir(parents=True)
    listed = in_the_list(shown, tmp_path)

    assert (listed["name"], listed["checkpoint_step"], listed["status"]) == ("cats", 7, "not known")
    assert listed["missing"] == ["run.json is missing"]
    assert "nothing was removed" in shown("runs", "rm", str(tmp_path / "theirs"), "--yes")


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_damaged_death_record_is_called_that_and_top_says_what_why_says(
    tmp_path: Path, shown: Shown, is_judged: bool
) -> None:
    attempt = make_attempt(tmp_path / "cats", 5.0, dies_of="killed")
    (attempt / "death.json").write_text("")
    if not is_judged:
        (attempt / "verdict.json").unlink()
    told = shown("why", str(tmp_path / "cats"))
    status = "killed" if is_judged else "unknown"

    assert told.startswith(f"{status}: cats")
    assert "the death record is damaged" in told
    assert "no death record" not in told
    assert shown("top", str(tmp_path / "cats"), "--once").startswith(f"cats #1: {status}")
    assert in_the_list(shown, tmp_path)["status"] == status


READERS = (
    ("why", "cats"), ("why", "cats", "--format", "json"), ("top", "cats", "--once"), ("runs", "."),
    ("report", "cats", "-o", "page.html"), ("ckpt", "list", "cats"),
)  # fmt: skip


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("damage", [_pipe, _endless])
def test_what_is_no_file_is_not_read_and_holds_nobody_up(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = make_attempt(tmp_path / "cats", 30.0)
    notes = folder / "process-4242"
    notes.mkdir()
    for name in ("beacon", "fault.txt", "cells"):
        (notes / name).touch()
    (tmp_path / "cats" / "micro-batches.jsonl").touch()
    for path in [path for path in (tmp_path / "cats").rglob("*") if path.is_file()]:
        damage(path)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    code = limited + "import sys; from buoy.cli import main; sys.exit(main(sys.argv[1:]))"
    for words in READERS:
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=400
        )

        assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, (words, done.stderr)


def test_numbers_that_no_clock_or_disk_can_tell_are_as_good_as_none(tmp_path: Path, shown: Shown) -> None:
    folder = make_attempt(tmp_path / "cats", 30.0)
    about = json.loads((folder / "attempt.json").read_text())
    odd = {
        "wall": 1e300,
        "t": float("nan"),
        "limits": {"ram": float("inf"), "disk": 10**400},
        "cwd": "\ud800",
    }
    (folder / "attempt.json").write_text(json.dumps({**about, **odd, "hostname": "a\u0000b"}))
    (samples,) = folder.glob("samples-*")
    header, *rows = samples.read_text().splitlines()
    odd_rows = [f"[{','.join([value] * len(FIELDS))}]" for value in ("NaN", "1e999", '"x"', "[]", "-1e308")]
    samples.write_text("\n".join([header, *rows, *odd_rows]) + "\n")
    with open(folder / "events.jsonl", "a") as file:
        for value in (float("nan"), 1e300, 10**30, [], {"a": []}, "²"):
            file.write(json.dumps({"kind": "training", "run": value, "step": value, "t": value}) + "\n")
            file.write(json.dumps({"kind": "save", "what": "buoy", "path": value, "step": value}) + "\n")

    for words in (("why", "--format", "json"), ("top", "--format", "json"), ("report", "--format", "json")):
        json.loads(shown(words[0], str(tmp_path / "cats"), *words[1:]), parse_constant=pytest.fail)
    page = tmp_path / "page.html"
    assert "wrote" in shown("report", str(tmp_path / "cats"), "-o", str(page))
    page.read_text(encoding="utf-8")


def test_a_folder_with_an_odd_name_is_no_attempt(tmp_path: Path, shown: Shown) -> None:
    make_attempt(tmp_path / "cats", 30.0)
    for name in ("²", "٣", "9" * 30):
        (tmp_path / "cats" / "attempts" / name).mkdir()
    (tmp_path / "cats" / "attempts" / "0001" / "process-²").mkdir()

    assert in_the_list(shown, tmp_path)["attempts"] == 1
    assert "cats #1" in shown("why", str(tmp_path / "cats"), "--format", "concise")


def test_a_run_that_cannot_be_read_hides_no_other(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_attempt(tmp_path / "cats", 30.0)
    make_attempt(tmp_path / "dogs", 30.0)
    (tmp_path / "loop").symlink_to("loop")
    really = runs.describe
    monkeypatch.setattr(runs, "describe", lambda run: really(run) if "dogs" in run else [][0])

    told = shown("runs", str(tmp_path))

    assert f"{tmp_path / 'dogs'} " in told
    assert "cats: this run cannot be read (IndexError: list index out of range); please report it" in told
