"""Without a name the process's story is told, with the step, the checkpoints and the advice of the run it was at."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import PID, Attempt, exited

import buoy
from buoy.checkpoint.store import Store
from buoy.cli import main
from buoy.flight.attempt import find_attempt, point_to
from buoy.verdict.select import concerned, trained_last
from buoy.view import history
from buoy.view.top import lines, state

KERNEL = ["python", "/lib/ipykernel_launcher.py", "-f", "kernel.json"]


class Process:
    """A script whose first run, runs/train, holds the recording; its beacon stands at step 120."""

    def __init__(self, tmp_path: Path, status: int = 9) -> None:
        self.attempt = Attempt(tmp_path, status)
        self.attempt.attempt.update(mode="watch", command=["python", "two.py"])
        self.runs = tmp_path / "runs"

    def trains(self, before: float, name: str, finished_at: int | None = None, opens: bool = True) -> None:
        run = "." if name == "train" else f"../{name}"
        if opens:
            self.attempt.event("opened", before + 1, run=run, path=str(self.runs / name), newest=None)
        self.attempt.event("training", before, run=run, step=0, left=0)
        if finished_at is not None:
            self.attempt.event("trained", before - 1, run=run, step=finished_at, finished=True)

    def write(self, *names: str) -> None:
        self.attempt.write()
        for name in names:
            point_to(str(self.runs / name), find_attempt(str(self.runs / "train")))


def save(run: Path, step: int) -> None:
    saver = Store(str(run)).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, {"step": step}, lambda value: None, wait=True)
    saver.close()


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    """Killed in lr2, after runs/train was finished; both had made a checkpoint."""
    process = Process(tmp_path)
    process.trains(400.0, "train", finished_at=100)
    process.trains(200.0, "lr2")
    process.write("lr2")
    save(process.runs / "train", 100)
    save(process.runs / "lr2", 80)
    monkeypatch.chdir(tmp_path)
    return process


def test_the_death_is_that_of_the_run_that_trained(
    killed: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["why"])
    told = capsys.readouterr().out

    assert code == 0
    assert told.startswith("killed: lr2, attempt 1")
    assert "step 120" in told
    assert "lr2/checkpoints/step-000000080" in told
    assert buoy.why("runs/train").cause.id == "finished"  # whoever names it means it


def test_top_and_report_are_about_that_run_too(killed: Process, capsys: pytest.CaptureFixture[str]) -> None:
    (killed.attempt.folder / "verdict.json").write_text(json.dumps(buoy.why().to_json()))
    main(["top", "--once"])
    shown = capsys.readouterr().out
    main(["report", "--format", "json"])
    page = json.loads(capsys.readouterr().out)

    assert shown.startswith("lr2 #1: killed")
    assert "safe at step 80" in shown and "step 120" in shown
    assert page["name"] == "lr2"


def test_the_attempt_of_the_run_that_holds_the_recording_tells_the_same(killed: Process) -> None:
    verdict = buoy.why("runs/train", 1)

    assert (Path(verdict.run).name, verdict.cause.id, verdict.where.step) == ("lr2", "killed", 120)


def test_an_end_after_the_last_training_keeps_its_cause_and_says_that_nothing_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tmp_path, exited(3))
    process.trains(400.0, "train", finished_at=100)
    process.trains(200.0, "lr2", finished_at=120)
    process.write("lr2")
    save(process.runs / "lr2", 120)
    monkeypatch.chdir(tmp_path)
    verdict = buoy.why()

    assert (Path(verdict.run).name, verdict.cause.id) == ("lr2", "exit-code")
    assert "had finished at step 120" in verdict.cause.cascade[0].text
    assert verdict.cause.next[0].startswith("nothing of its training was lost")
    assert not any("resume from" in step for step in verdict.cause.next)


def test_memory_that_runs_out_after_the_training_is_no_reason_to_train_smaller(tmp_path: Path) -> None:
    """What a notebook's card says when a later cell was too large."""
    process = Process(tmp_path)
    process.attempt.attempt["command"] = KERNEL
    process.attempt.oom_killed()
    process.trains(200.0, "lr2", finished_at=120)
    process.write("lr2")
    verdict = buoy.why(str(process.runs / "train"), 1)

    assert (Path(verdict.run).name, verdict.cause.id) == ("train", "kernel-oom")
    assert verdict.cause.next[1].startswith("nothing of lr2 was lost")
    assert not any("batch" in step or "resume from" in step for step in verdict.cause.next)


def test_a_plain_loop_after_a_finished_run_is_not_that_run(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.attempt.attempt["command"] = KERNEL
    process.trains(200.0, "lr2", finished_at=5)
    process.attempt.event("loop", 198.0, left=5)
    process.attempt.event(
        "save", 199.0, what="buoy", path=str(process.runs / "lr2/checkpoints/step-5"), step=5
    )
    process.write("lr2")
    save(process.runs / "lr2", 5)
    recording = find_attempt(str(process.runs / "train"))
    now = state(recording)
    verdict = buoy.why(str(process.runs / "train"))

    assert concerned(recording) == recording.run_folder
    assert (now["name"], now["checkpoint"], now["step"]) == ("train", None, 120)
    assert "no checkpoint" in lines(now)
    assert "save a checkpoint every few minutes" in verdict.cause.next[0]


def test_advice_comes_from_the_runs_own_folder(killed: Process, tmp_path: Path) -> None:
    """A resumed run has checkpoints that this recording did not see made; one that was left may have none."""
    killed.trains(100.0, "lr3")
    killed.write("lr3")
    left = buoy.why("runs/lr2").cause
    save(killed.runs / "lr3", 60)

    assert left.id == "left" and "resumes from its last checkpoint, step 80" in left.next[0]
    assert "lr3/checkpoints/step-000000060" in buoy.why("runs/lr3").cause.next[0]
    for name in ("lr2", "lr3"):
        for file in sorted((killed.runs / name / "checkpoints").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    assert "it has no checkpoint here" in buoy.why("runs/lr2").cause.next[0]
    assert "no checkpoint had been made yet" in buoy.why("runs/lr3").cause.next[0]


def test_every_view_takes_the_step_from_one_place(
    killed: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample is a moment older than the beacon."""
    with (killed.attempt.folder / f"process-{PID}" / "beacon").open("r+b") as file:
        file.seek(64)
        file.write(struct.pack("<Q", 122))
    main(["runs", "runs/lr2", "--format", "json"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    life = history.read("runs/lr2").lives[-1]

    assert buoy.why().where.step == run["step"] == life.last["step"] == 122
    assert state(find_attempt("runs/lr2"), "runs/lr2")["step"] == 122


@pytest.fixture
def living(tmp_path: Path) -> Attempt:
    """A kernel, this very process, that trained runs/a up to step 61."""
    attempt = Attempt(tmp_path)
    attempt.alive()
    attempt.attempt.update(mode="watch", command=KERNEL)
    attempt.process(os.getpid(), step=61)
    attempt.event("opened", 5.0, run="../a", newest=None)
    attempt.event("training", 4.0, run="../a", step=0, left=0)
    attempt.write()
    point_to(str(tmp_path / "runs" / "a"), find_attempt(str(tmp_path / "runs" / "train")))
    return attempt


def _ends_its_cell(attempt: Attempt) -> None:
    with (attempt.folder / f"process-{os.getpid()}" / "beacon").open("r+b") as file:
        file.seek(104)
        file.write(struct.pack("<Q", 5))


def test_a_training_left_by_an_exception_in_a_living_kernel_is_not_running(
    living: Attempt, tmp_path: Path
) -> None:
    assert buoy.why(str(tmp_path / "runs" / "a")).cause.id == "still-running"
    living.event("cell-error", 1.0, type="builtins.ValueError", message="bad labels", step=61)
    living.write()
    _ends_its_cell(living)
    verdict = buoy.why(str(tmp_path / "runs" / "a"))

    assert verdict.cause.id == "left"
    assert "The kernel is alive and idle" in verdict.cause.claim.text
    assert "stopped at step 61, unfinished, with ValueError" in verdict.cause.claim.text
    assert "it has no checkpoint here" in verdict.cause.next[0]


def test_an_exception_in_a_cell_before_it_trained_again_left_nothing(living: Attempt, tmp_path: Path) -> None:
    living.event("cell-error", 3.0, type="builtins.ValueError", message="bad labels", step=40)
    living.event("training", 2.0, run="../a", step=40, left=40)
    living.write()
    _ends_its_cell(living)

    assert "ValueError" not in buoy.why(str(tmp_path / "runs" / "a")).cause.claim.text


def test_a_kernel_that_waits_for_the_answer_trains_nothing(living: Attempt, tmp_path: Path) -> None:
    """`!buoy why runs/a` in a cell: that cell runs, and its process is below the kernel's."""
    told = {}
    for verb in (("why",), ("top", "--once"), ("runs",)):
        command = [sys.executable, "-m", "buoy", verb[0], str(tmp_path / "runs" / "a"), *verb[1:]]
        told[verb[0]] = subprocess.run(command, capture_output=True, text=True, timeout=400).stdout

    assert "left: a" in told["why"] and "alive and idle" in told["why"]
    assert "idle" in told["top"].splitlines()[0]
    assert "idle" in told["runs"].splitlines()[1]


def test_a_fresh_kernel_does_not_hide_whose_training_died_before(killed: Process) -> None:
    second = killed.attempt.folder.with_name("0002")
    second.mkdir()
    now = {"number": 2, "pid": os.getpid(), "t": time.monotonic() - 1, "wall": time.time() - 1}
    (second / "attempt.json").write_text(json.dumps({**killed.attempt.attempt, **now}))
    verdict = buoy.why()

    assert (Path(verdict.run).name, verdict.cause.id, verdict.attempt) == ("lr2", "killed", 1)
    assert "attempt 2 is running now" in (verdict.beside or "")


def test_a_folder_of_runs_names_none_of_them(killed: Process) -> None:
    assert Path(buoy.why("runs").run).name == Path(buoy.why(".").run).name == "lr2"


def test_a_plain_loop_after_a_training_that_was_interrupted_is_not_that_run(
    living: Attempt, tmp_path: Path
) -> None:
    """Its checkpoint makes nothing safe of what is trained now."""
    save(tmp_path / "runs" / "a", 5)
    living.event("cell-error", 2.0, type="builtins.KeyboardInterrupt", message="", step=5)
    living.event("loop", 1.0, left=5)
    living.write()
    now = state(find_attempt(str(tmp_path / "runs" / "train")))
    _ends_its_cell(living)

    assert (now["name"], now["step"], now["checkpoint"]) == ("train", 61, None)
    assert (
        "stopped at step 5, unfinished, with KeyboardInterrupt"
        in buoy.why(str(tmp_path / "runs" / "a")).cause.claim.text
    )


def test_a_plain_loop_after_a_training_that_only_paused_is_not_that_run(
    living: Attempt, tmp_path: Path
) -> None:
    """The next cell of a notebook; asked from another terminal."""
    recording = find_attempt(str(tmp_path / "runs" / "train"))
    assert trained_last(recording) == str(tmp_path / "runs" / "a")
    living.event("loop", 1.0, left=40)
    living.write()
    own, other = state(recording), state(recording, str(tmp_path / "runs" / "a"))

    assert (own["name"], own["step"], own["checkpoint"]) == ("train", 61, None)
    assert (other["status"], other["step"], other["loop_beside"]) == ("left unfinished", 40, 61)
    assert buoy.why(str(tmp_path / "runs" / "a")).where.step == 40
    assert trained_last(recording) == recording.run_folder


def test_a_kernel_without_a_step_trained_nothing(living: Attempt, tmp_path: Path) -> None:
    living.events = living.events[:1]
    living.process(os.getpid(), step=0)
    living.write()
    recording = find_attempt(str(tmp_path / "runs" / "train"))
    assert trained_last(recording) is None

    living.process(os.getpid(), step=1)
    assert trained_last(recording) == recording.run_folder
