"""A run that was left before its kernel ended keeps its own story; the kernel's end is told beside it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from folders import DIED_WALL, PID, Attempt

import buoy
from buoy.checkpoint.store import Store
from buoy.cli import main
from buoy.flight.attempt import find_attempt, point_to
from buoy.verdict.evidence import load
from buoy.verdict.notebook import in_a_line
from buoy.view import report
from buoy.view.history import read

KERNEL = ["python", "/lib/ipykernel_launcher.py", "-f", "kernel.json"]


class Kernel:
    """A notebook's kernel, recorded in runs/train; its beacon stands at step 120."""

    def __init__(self, tmp_path: Path, status: int = 9) -> None:
        self.attempt = Attempt(tmp_path, status)
        self.attempt.attempt.update(mode="watch", command=KERNEL)
        self.runs = tmp_path / "runs"

    def trains(self, before: float, name: str, **more: Any) -> None:
        self.attempt.event("opened", before + 1, run=f"../{name}", newest=None)
        self.attempt.event("training", before, run=f"../{name}", step=0, left=0, **more)
        point_to(str(self.runs / name), find_attempt(str(self.write())))

    def fails(self, before: float, *names: str, step: int = 9, kind: str = "builtins.ValueError") -> None:
        runs = [f"../{name}" for name in names]
        self.attempt.event("cell-error", before, type=kind, message="bad labels", step=step, runs=runs)
        self.write()

    def rests(self) -> None:
        """No cell runs any more."""
        with (self.attempt.folder / f"process-{PID}" / "beacon").open("r+b") as file:
            file.seek(104)
            file.write(struct.pack("<Q", 5))

    def write(self) -> Path:
        self.attempt.write()
        return self.runs / "train"

    def why(self, name: str, number: int | None = None) -> buoy.Verdict:
        return buoy.why(str(self.runs / name), number)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """It trained runs/a up to a ValueError at step 9, and was killed 2 s later between two cells."""
    made = Kernel(tmp_path)
    made.trains(60.0, "a")
    made.fails(2.0, "a")
    made.rests()
    return made


def test_a_run_that_an_exception_left_was_not_killed_with_its_idle_kernel(kernel: Kernel) -> None:
    verdict = kernel.why("a")

    assert (verdict.cause.id, verdict.cause.claim.grade, verdict.where.step) == ("left", "likely", 9)
    assert "stopped at step 9, unfinished, with ValueError" in verdict.cause.claim.text
    assert "ValueError: bad labels" in verdict.cause.claim.evidence[0].text
    assert "killed" in (verdict.beside or "")


def test_nor_with_one_that_was_told_to_stop(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 15)
    kernel.trains(60.0, "a")
    kernel.fails(2.0, "a")
    kernel.rests()

    assert "stopped at step 9, unfinished, with ValueError" in kernel.why("a").cause.claim.text


def test_the_kernels_own_card_names_what_became_of_each_run(kernel: Kernel) -> None:
    kernel.attempt.event("training", 1.5, run="../b", step=0, left=9)
    kernel.attempt.event("trained", 1.0, run="../b", step=16, finished=True)
    kernel.attempt.oom_killed()
    kernel.trains(0.9, "c")
    kernel.fails(0.5, "c", step=3)
    verdict = kernel.why("train", 1)

    assert (Path(verdict.run).name, verdict.cause.id) == ("train", "kernel-oom")
    assert [claim.text.rsplit(", ", 1)[0] for claim in verdict.cause.cascade] == [
        "c stopped at step 3, unfinished, with ValueError",
        "b finished at step 16",
        "a stopped at step 9, unfinished, with ValueError",
    ]
    assert verdict.where.step is None  # what the beacon counted was none of the kernel's last cell
    assert verdict.cause.next[1].startswith("c: train it again in a cell")
    assert not any("batch" in step for step in verdict.cause.next)


def test_after_a_training_that_was_finished_it_is_the_kernels_too(kernel: Kernel) -> None:
    kernel.trains(1.5, "b")
    kernel.attempt.event("trained", 1.0, run="../b", step=120, finished=True)
    kernel.write()
    verdict = kernel.why("train", 1)

    assert Path(verdict.run).name == "train"
    assert [claim.text.rsplit(", ", 1)[0] for claim in verdict.cause.cascade] == [
        "b finished at step 120",
        "a stopped at step 9, unfinished, with ValueError",
    ]


def test_that_of_a_kernel_at_a_run_names_only_that_one(kernel: Kernel) -> None:
    kernel.trains(1.5, "b")
    kernel.attempt.process(PID)  # in its cell
    verdict = kernel.why("train", 1)

    assert (Path(verdict.run).name, verdict.cause.cascade) == ("b", ())


def test_a_run_that_holds_the_recording_itself_is_told_of_alike(tmp_path: Path) -> None:
    """`buoy.Run` without `%load_ext buoy`."""
    kernel = Kernel(tmp_path)
    kernel.trains(90.0, "a")
    kernel.attempt.event("trained", 80.0, run="../a", step=16, finished=True)
    kernel.attempt.event("opened", 70.0, run=".", newest=None)
    kernel.attempt.event("training", 60.0, run=".", step=0, left=16)
    kernel.write()
    trained = kernel.why("train", 1)
    kernel.attempt.event("cell-error", 2.0, type="builtins.ValueError", message="", step=9, runs=["."])
    kernel.write()
    kernel.rests()
    idle = kernel.why("train", 1)

    assert trained.cause.cascade == () and "no checkpoint had been made yet" in trained.cause.next[0]
    assert [claim.text.rsplit(", ", 1)[0] for claim in idle.cause.cascade] == [
        "train stopped at step 9, unfinished, with ValueError",
        "a finished at step 16",
    ]
    assert kernel.why("train").cause.id == "left"


def test_a_loop_without_a_run_afterwards_does_not_hide_the_exception(kernel: Kernel) -> None:
    """A later cell trains by hand and is killed in the middle."""
    kernel.attempt.event("loop", 1.0, left=9)
    kernel.write()
    verdict = kernel.why("a")

    assert "stopped at step 9, unfinished, with ValueError" in verdict.cause.claim.text


def test_an_exception_in_a_later_cell_is_not_what_left_it(kernel: Kernel) -> None:
    kernel.fails(1.0, kind="builtins.NameError")

    assert "ValueError" in kernel.why("a").cause.claim.text


def test_nor_is_one_in_a_cell_that_trained_nothing(tmp_path: Path) -> None:
    """Its loop had paused; nobody knows whether it was done."""
    kernel = Kernel(tmp_path)
    kernel.trains(60.0, "a")
    kernel.fails(1.0, kind="builtins.NameError", step=40)

    assert "NameError" not in str(kernel.why("a").to_json())


def test_a_kernel_killed_between_two_cells_killed_no_training(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.trains(60.0, "a")
    assert kernel.why("a").cause.id == "killed"
    kernel.rests()
    verdict = kernel.why("a")

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("left", "likely")
    assert "no cell was running" in verdict.cause.claim.text


def test_with_around_a_run_does_not_hide_the_exception(tmp_path: Path) -> None:
    """Leaving `with` gives the training up before the cell is at its end."""
    kernel = Kernel(tmp_path)
    kernel.trains(60.0, "a")
    kernel.attempt.event("trained", 2.1, run="../a", step=9, finished=False)
    kernel.fails(2.0, "a")

    assert "stopped at step 9, unfinished, with ValueError" in kernel.why("a").cause.claim.text


def test_the_list_says_that_it_was_left(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    (kernel.attempt.folder / "verdict.json").write_text(json.dumps(kernel.why("train", 1).to_json()))
    main(["runs", str(kernel.runs.parent), "--format", "json"])
    told = {run["name"]: run["status"] for run in json.loads(capsys.readouterr().out)["runs"]}

    assert told == {"train": "killed", "a": "left unfinished"}


def test_an_end_that_could_not_be_saved_is_told_with_what_is_lost(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.trains(60.0, "a")
    saver = Store(str(kernel.runs / "a")).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, {"step": 64}, lambda value: None, wait=True)
    saver.close()
    why = "No space left on device"
    ended = {"run": "../a", "step": 320, "finished": False, "unsaved": why, "no_room": True}
    kernel.attempt.event("trained", 2.0, **ended)
    kernel.write()
    kernel.rests()
    verdict = kernel.why("a")

    assert (verdict.cause.id, verdict.cause.claim.grade, verdict.where.step) == ("unsaved", "certain", 320)
    assert (
        "reached its end at step 320, which could not be saved: the disk is full" in verdict.cause.claim.text
    )
    assert verdict.cause.claim.evidence[0].text == why
    assert "resumes from its last checkpoint, step 64" in verdict.cause.next[0]
    assert "steps 65 to 320 are lost" in verdict.cause.next[0]
    assert any("could not be saved" in claim.text for claim in kernel.why("train", 1).cause.cascade)


def test_the_restart_of_a_kernel_at_rest_is_told_in_one_line(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 15)
    kernel.trains(60.0, "a")
    verdict, evidence = kernel.why("train", 1), kernel.attempt.evidence()
    assert verdict.cause.id == "terminated" and in_a_line(verdict, evidence) is None  # it trained
    kernel.fails(2.0, "a")
    kernel.rests()
    verdict, evidence = kernel.why("train", 1), load(str(kernel.attempt.folder))
    line = in_a_line(verdict, evidence) or ""

    assert verdict.cause.actor is not None
    assert verdict.cause.actor.text.startswith("not recorded: a notebook's restart or shutdown")
    assert not any("sacct" in step for step in verdict.cause.next)
    assert (
        "between two cells, as a restart does" in line
        and "a stopped at step 9, unfinished, with ValueError" in line
    )
    assert "buoy why" in line and "\n" not in line


def test_a_kernel_that_trained_nothing_is_not_told_to_save(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    assert any("save a checkpoint every few minutes" in step for step in kernel.attempt.verdict().cause.next)
    kernel.attempt.process(PID, step=0)
    for sample in kernel.attempt.samples:
        sample["step"] = 0

    assert not any("save" in step or "resume" in step for step in kernel.attempt.verdict().cause.next)


def test_the_page_of_a_kernel_names_the_run_of_each_checkpoint(kernel: Kernel) -> None:
    """The card may say that there is none of one run; the table and the marks are of the others."""
    saver = Store(str(kernel.runs / "b")).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, {"step": 16}, lambda value: None, wait=True)
    saver.close()
    path = str(kernel.runs / "b" / "checkpoints" / "step-000000016")
    kernel.attempt.event("training", 1.5, run="../b", step=0, left=9)
    kernel.attempt.event("trained", 1.0, run="../b", step=16, finished=True)
    kernel.attempt.event("save", 1.0, what="buoy", path=path, step=16)
    kernel.write()
    (kernel.attempt.folder / "verdict.json").write_text(json.dumps(kernel.attempt.verdict().to_json()))
    history = read(str(kernel.runs / "train"))
    told = report.as_json(history)
    marks = [mark["text"] for mark in told["timelines"]["whole"]["marks"]]

    assert [(each["run"], each["step"]) for each in told["checkpoints"]] == [("b", 16)]
    assert "b: checkpoint at step 16" in marks
    assert "<th>run</th>" in report.page(history)
    assert "a stopped at step 9, unfinished, with ValueError" in str(
        told["attempts"][0]["verdict"]["cause"]["cascade"]
    )
    assert "<th>run</th>" not in report.page(read(str(kernel.runs / "b")))


def test_an_exception_leaves_both_that_are_trained_in_turns(tmp_path: Path) -> None:
    """The recorder counts the steps of the one that was announced last: of the other no step is claimed."""
    kernel = Kernel(tmp_path)
    kernel.trains(60.0, "a")
    kernel.trains(59.0, "b", together=True)
    kernel.fails(2.0, "a", "b", step=20)
    told = {name: kernel.why(name) for name in "ab"}

    assert {name: verdict.where.step for name, verdict in told.items()} == {"a": None, "b": 20}
    assert all("with ValueError" in verdict.cause.claim.text for verdict in told.values())


def test_of_two_trained_in_turns_none_was_left_for_the_other(tmp_path: Path) -> None:
    """Each epoch of the one is announced after the other's; the first ends, and with it the loop around both."""
    kernel = Kernel(tmp_path)
    for name, left, together in (("a", 0, False), ("b", 0, True), ("a", 16, False), ("b", 16, True)):
        kernel.trains(60.0, name, together=together) if not left else kernel.attempt.event(
            "training", 50.0, run=f"../{name}", step=16, left=16, together=together
        )
    kernel.attempt.event("training", 40.0, run="../a", step=32, left=32, together=False)
    kernel.attempt.event("trained", 40.0, run="../a", step=32, finished=True)
    kernel.write()
    kernel.rests()
    verdict = kernel.why("b")

    assert (verdict.cause.id, verdict.where.step, verdict.cause.claim.grade) == ("left", 32, "likely")
    assert "another run trained next" in verdict.cause.claim.text
    assert kernel.why("a").cause.id == "finished"
    kernel.trains(30.0, "c")
    assert kernel.why("b").cause.claim.text == verdict.cause.claim.text  # c began after it had been left


def _finished_and_then_a_loop(tmp_path: Path) -> Kernel:
    """runs/a was finished at step 200; a loop without a run did 120 steps; then the idle kernel was killed."""
    kernel = Kernel(tmp_path)
    kernel.trains(60.0, "a")
    kernel.attempt.event("trained", 30.0, run="../a", step=200, finished=True)
    kernel.attempt.event("loop", 25.0, left=200)
    kernel.rests()
    return kernel


def test_a_loop_after_a_finished_run_is_not_called_safe(tmp_path: Path) -> None:
    kernel = _finished_and_then_a_loop(tmp_path)
    kernel.write()
    verdict = kernel.why("train", 1)
    words = str(verdict)

    assert verdict.cause.next[0].startswith("the loop without a run: save a checkpoint every few minutes")
    assert "nothing of a was lost: training had finished" in verdict.cause.next
    assert "a loop without a run trained last, 120 steps" in " ".join(words.split())
    assert kernel.why("a").cause.id == "finished"


def test_what_that_loop_saved_is_where_it_goes_on(tmp_path: Path) -> None:
    kernel = _finished_and_then_a_loop(tmp_path)
    kernel.attempt.event("save", 40.0, what="torch.save", path="before.pt")
    kernel.attempt.event("save", 5.0, what="torch.save", path="loop.pt")
    kernel.write()
    verdict = kernel.why("train", 1)

    assert "loop.pt" in verdict.cause.next[0]
    assert "no checkpoint" not in str(verdict)


def test_what_was_saved_before_it_is_none_of_its_own(tmp_path: Path) -> None:
    kernel = _finished_and_then_a_loop(tmp_path)
    kernel.attempt.events.insert(2, {**kernel.attempt.events[1], "kind": "save", "what": "torch.save",
                                     "path": "before.pt"})  # fmt: skip
    kernel.write()

    assert "before.pt" not in str(kernel.why("train", 1))


def test_a_script_whose_loop_died_after_its_run_was_finished_lost_that_loop(tmp_path: Path) -> None:
    script = Attempt(tmp_path)
    script.oom_killed()
    script.event("opened", 60.0, run=".", newest=None)
    script.event("training", 59.0, run=".", step=0, left=0)
    script.event("trained", 30.0, run=".", step=200, finished=True)
    script.event("loop", 25.0, left=200)
    script.write()
    verdict = buoy.why(str(tmp_path / "runs"))

    assert verdict.cause.id == "kernel-oom"
    assert any("save a checkpoint every few minutes" in step for step in verdict.cause.next)
    assert "nothing of train was lost" in verdict.cause.next[-1]


def test_how_to_go_on_is_not_said_twice(kernel: Kernel) -> None:
    """`buoy.Run` in the folder that holds the recording too."""
    folder = kernel.runs / "train"
    kernel.attempt.event("opened", 1.9, run=".", newest=None)
    kernel.attempt.event("training", 1.8, run=".", step=0, left=9)
    kernel.attempt.event(
        "save", 1.5, what="buoy", path=str(folder / "checkpoints" / "step-000000007"), step=7
    )
    kernel.attempt.event("cell-error", 1.0, type="builtins.ValueError", message="", step=9, runs=["."])
    kernel.write()
    saver = Store(str(folder)).saver(lambda words: None, lambda kind, **values: None)
    saver.save({"x": 1}, {"step": 8, "epoch": 0, "time": DIED_WALL - 1.5}, lambda value: None, wait=True)
    saver.close()
    verdict = buoy.why(str(kernel.runs), None)

    assert verdict.cause.next[0].startswith(
        "train: train it again in a cell: it resumes from its last checkpoint, step 8"
    )
    assert not any(step.startswith("resume from") for step in verdict.cause.next)
