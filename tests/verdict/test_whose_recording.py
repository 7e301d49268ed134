"""A run names the attempt that recorded it; another attempt in that place tells nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from folders import Attempt

import buoy
from buoy.cli import main
from buoy.flight.attempt import attempts_of, find_attempt, point_to

KERNEL = ["python", "/lib/ipykernel_launcher.py", "-f", "kernel.json"]


def _recorded(tmp_path: Path, names: str = "a") -> Attempt:
    """A kernel that was killed while it trained the last of these runs, recorded in runs/train."""
    attempt = Attempt(tmp_path, 9)
    attempt.attempt.update(mode="watch", command=KERNEL)
    for name in names:
        attempt.event("opened", 500.0, run=f"../{name}", path=f"/content/runs/{name}", newest=None)
        attempt.event("training", 400.0, run=f"../{name}", step=0, left=0)
    attempt.write()
    for name in names:
        point_to(str(tmp_path / "runs" / name), find_attempt(str(attempt.folder.parents[1])))
    return attempt


def _record_anew(old: Attempt, **about: Any) -> None:
    """The recording is removed, and a new kernel, this very process, begins at number 1 in its place."""
    for name in ("death.json", "events.jsonl", "samples-0001.jsonl"):
        (old.folder / name).unlink()
    values = {**old.attempt, "pid": os.getpid(), "t": time.monotonic() - 1, "wall": time.time() - 1, **about}
    (old.folder / "attempt.json").write_text(json.dumps(values))


def _older(run: Path) -> None:
    """The pointer as it was written before it said more than a number."""
    marker = json.loads((run / "run.json").read_text())
    marker["recorded"] = [{key: each[key] for key in ("run", "attempt")} for each in marker["recorded"]]
    (run / "run.json").write_text(json.dumps(marker))


@pytest.mark.parametrize("is_older", [False, True])
def test_a_new_recording_of_the_same_number_tells_nothing_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_older: bool
) -> None:
    recording = _recorded(tmp_path)
    if is_older:
        _older(tmp_path / "runs" / "a")
    assert buoy.why(str(tmp_path / "runs" / "a")).cause.id == "killed"
    _record_anew(recording)
    code = main(["why", str(tmp_path / "runs" / "a")])
    main(["runs", str(tmp_path / "runs" / "a"), "--format", "json"])
    captured = capsys.readouterr()
    (run,) = json.loads(captured.out)["runs"]

    assert code == 2
    assert "the recording that it names is not here (train)" in captured.err
    assert (
        f"bring {tmp_path / 'runs' / 'train'} here too; if that was removed, only its checkpoints"
        in captured.err
    )
    assert (run["status"], run["alive"]) == ("not known", False)


def test_a_run_carried_alone_to_where_another_recording_has_that_name_is_not_told_by_it(
    tmp_path: Path,
) -> None:
    """Both were recorded by a kernel under runs/train, attempt 1; here that is another's death."""
    _recorded(tmp_path / "there")
    here = _recorded(tmp_path / "here", "b")
    here.attempt.update(boot_id="another", pid=77)
    here.write()
    shutil.copytree(tmp_path / "there" / "runs" / "a", tmp_path / "here" / "runs" / "a")

    assert attempts_of(str(tmp_path / "here" / "runs" / "a")) == []


def test_folders_carried_together_still_find_each_other(tmp_path: Path) -> None:
    _recorded(tmp_path / "there")
    shutil.copytree(tmp_path / "there", tmp_path / "here")

    assert buoy.why(str(tmp_path / "here" / "runs" / "a")).cause.id == "killed"


def test_one_recorded_again_says_that_the_last_recording_is_not_here(tmp_path: Path) -> None:
    recording = _recorded(tmp_path)
    later = tmp_path / "runs" / "later" / "attempts" / "0001"
    later.mkdir(parents=True)
    (later / "attempt.json").write_text(json.dumps({**recording.attempt, "wall": time.time()}))
    point_to(str(tmp_path / "runs" / "a"), find_attempt(str(later)))
    shutil.rmtree(tmp_path / "runs" / "later")

    assert "a later recording of this run is not here" in (
        buoy.why(str(tmp_path / "runs" / "a")).beside or ""
    )


def test_an_attempt_that_did_not_record_the_run_is_none_of_its(tmp_path: Path) -> None:
    recording = _recorded(tmp_path)
    second = recording.folder.with_name("0002")
    second.mkdir()
    (second / "attempt.json").write_text(json.dumps({**recording.attempt, "number": 2}))

    with pytest.raises(buoy.BuoyError, match="no such attempt"):
        buoy.why(str(tmp_path / "runs" / "a"), 2)


def test_before_a_recording_is_removed_the_runs_in_it_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _recorded(tmp_path, "ab")
    shutil.rmtree(tmp_path / "runs" / "b")
    main(["runs", "rm", str(tmp_path / "runs" / "train")])
    asked = capsys.readouterr().err

    assert "holds the recording of" in asked and os.path.join("runs", "a") in asked
    assert os.path.join("runs", "b") not in asked
    assert (tmp_path / "runs" / "train").exists()
