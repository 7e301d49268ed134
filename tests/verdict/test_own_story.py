"""Several runs in one kernel: each folder tells its own story. A live attempt does not hide the death before it."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from folders import DIED_T, PID, Attempt, exited

import buoy
from buoy.checkpoint.store import Store
from buoy.cli import main
from buoy.cli.top import _now
from buoy.flight.attempt import attempts_of, find_attempt, point_to
from buoy.view import history, report
from buoy.view.runs import describe
from buoy.view.top import lines, state

KERNEL = ["python", "/lib/ipykernel_launcher.py", "-f", "kernel.json"]


@pytest.fixture
def kernel(tmp_path: Path) -> Attempt:
    """A kernel that was killed, recorded in runs/train; it had trained a to its end, then b; c was only made."""
    attempt = Attempt(tmp_path, 9)
    attempt.attempt.update(mode="watch", command=KERNEL)
    for name in ("a", "b", "c"):
        attempt.event("opened", 500.0, run=f"../{name}", path=f"/content/runs/{name}", newest=None)
    attempt.event("training", 400.0, run="../a", step=0, left=0)
    attempt.event("trained", 300.0, run="../a", step=16, finished=True)
    attempt.event("training", 200.0, run="../b", step=0, left=16)
    attempt.write()
    recording = find_attempt(str(attempt.folder.parents[1]))
    for name in ("a", "b", "c"):
        point_to(str(tmp_path / "runs" / name), recording)
    return attempt


def story(tmp_path: Path, name: str, attempt: int | None = None) -> buoy.Verdict:
    return buoy.why(str(tmp_path / "runs" / name), attempt)


def test_a_training_finished_before_its_kernel_died_is_finished(kernel: Attempt, tmp_path: Path) -> None:
    verdict = story(tmp_path, "a")

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("finished", "certain")
    assert verdict.where.step == 16
    assert os.path.basename(verdict.run) == "a"
    assert "killed" in (verdict.beside or "")


def test_the_one_that_trained_when_the_kernel_died_died_with_it(kernel: Attempt, tmp_path: Path) -> None:
    verdict = story(tmp_path, "b")

    assert verdict.cause.id == "killed"
    assert os.path.basename(verdict.run) == "b"


def test_one_that_was_only_made_was_not_killed(kernel: Attempt, tmp_path: Path) -> None:
    verdict = story(tmp_path, "c")

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("not-begun", "likely")
    assert verdict.where.step is None and verdict.wall is None


def test_one_left_for_another_is_unfinished_where_it_was(kernel: Attempt, tmp_path: Path) -> None:
    kernel.event("training", 100.0, run="../c", step=0, left=7)
    kernel.write()
    verdict = story(tmp_path, "b")

    assert (verdict.cause.id, verdict.where.step) == ("left", 7)


def test_the_recording_itself_tells_of_the_kernel(kernel: Attempt, tmp_path: Path) -> None:
    assert story(tmp_path, "train").cause.id == "killed"


def test_a_finished_run_that_holds_the_recording_tells_of_its_kernel_when_the_attempt_is_named(
    kernel: Attempt, tmp_path: Path
) -> None:
    kernel.event("training", 150.0, run=".", step=0, left=0)
    kernel.event("trained", 120.0, run=".", step=5, finished=True)
    kernel.write()

    assert story(tmp_path, "train").cause.id == "finished"
    assert story(tmp_path, "train", 1).cause.id == "killed"


def test_a_script_that_fails_after_its_training_keeps_its_verdict_and_says_so(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, exited(3))
    attempt.event("training", 400.0, run=".", step=0, left=0)
    attempt.event("trained", 10.0, run=".", step=16, finished=True)
    attempt.write()
    verdict = story(tmp_path, "train")

    assert verdict.cause.id == "exit-code"
    assert "had finished at step 16" in verdict.cause.cascade[0].text


def test_the_list_tells_each_runs_own_state_and_step(
    kernel: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kernel.folder / "verdict.json").write_text(json.dumps(story(tmp_path, "train").to_json()))
    main(["runs", str(tmp_path), "--format", "json"])
    runs: dict[str, Any] = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}

    assert {name: run["status"] for name, run in runs.items()} == {
        "train": "killed", "a": "finished", "b": "killed", "c": "no step done",
    }  # fmt: skip
    assert (runs["a"]["step"], runs["c"]["step"]) == (16, None)


def _second_attempt(first: Attempt, tmp_path: Path, **about: Any) -> None:
    second = first.folder.with_name("0002")
    second.mkdir()
    values = {
        **first.attempt,
        "number": 2,
        "pid": os.getpid(),
        "t": time.monotonic() - 1,
        "wall": time.time() - 1,
    }
    (second / "attempt.json").write_text(json.dumps({**values, **about}))


def test_while_an_attempt_runs_well_why_tells_of_the_death_before_it(kernel: Attempt, tmp_path: Path) -> None:
    _second_attempt(kernel, tmp_path)
    verdict = story(tmp_path, "train")

    assert (verdict.cause.id, verdict.attempt) == ("killed", 1)
    assert "attempt 2 is running now" in (verdict.beside or "")
    assert story(tmp_path, "train", 2).cause.id == "still-running"


def test_after_an_attempt_that_ended_well_a_running_one_is_just_running(tmp_path: Path) -> None:
    first = Attempt(tmp_path, exited(0))
    first.write()
    _second_attempt(first, tmp_path)

    assert story(tmp_path, "train").cause.id == "still-running"


def test_a_run_trained_by_a_script_and_then_in_a_notebook_is_told_by_the_later(
    kernel: Attempt, tmp_path: Path
) -> None:
    own = tmp_path / "runs" / "a" / "attempts" / "0001"
    own.mkdir(parents=True)
    # Long before the kernel began.
    (own / "attempt.json").write_text(json.dumps({"number": 1, "wall": DIED_T}))
    known = attempts_of(str(tmp_path / "runs" / "a"))

    assert [os.path.basename(attempt.run_folder) for attempt in known] == ["a", "train"]
    assert story(tmp_path, "a").cause.id == "finished"


def test_a_kernel_that_only_opened_a_run_again_does_not_hide_how_it_ended(
    kernel: Attempt, tmp_path: Path
) -> None:
    _second_attempt(kernel, tmp_path)
    opened = [{"t": time.monotonic(), "kind": "opened", "run": f"../{name}", "newest": None} for name in "bc"]
    lines = "".join(json.dumps(event) + "\n" for event in opened)
    (kernel.folder.with_name("0002") / "events.jsonl").write_text(lines)
    point_to(str(tmp_path / "runs" / "b"), find_attempt(str(tmp_path / "runs" / "train"), 2))
    verdict = story(tmp_path, "b")

    assert (verdict.cause.id, verdict.attempt) == ("killed", 1)
    assert "attempt 2 opened it again" in (verdict.beside or "")


def test_top_tells_of_the_same_attempt_as_why_and_runs(kernel: Attempt, tmp_path: Path) -> None:
    _second_attempt(kernel, tmp_path)
    second = kernel.folder.with_name("0002")
    opened = [{"t": time.monotonic(), "kind": "opened", "run": f"../{name}", "newest": None} for name in "bc"]
    (second / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in opened))
    about = json.loads((second / "attempt.json").read_text())
    (second / "attempt.json").write_text(json.dumps({**about, "start_ticks": 1}))  # that kernel is gone too
    run = str(tmp_path / "runs" / "b")
    point_to(run, find_attempt(str(tmp_path / "runs" / "train"), 2))
    shown = _now(run)

    assert (shown["attempt"], shown["status"]) == (story(tmp_path, "b").attempt, "killed") == (1, "killed")
    assert describe(run)["status"] == "killed"
    assert lines(shown)[1] == "attempt 2 opened it again and did no step of it"


def test_advice_names_the_checkpoint_of_the_run_that_trained_last(kernel: Attempt, tmp_path: Path) -> None:
    for before, name in ((310.0, "a"), (150.0, "b"), (120.0, "c")):
        path = f"/content/runs/{name}/checkpoints/step-9"
        kernel.event("save", before, what="buoy", path=path, step=9)
    kernel.write()

    assert "/content/runs/b/checkpoints/step-9" in story(tmp_path, "b").cause.next[0]


def _opens_another(kernel: Attempt, tmp_path: Path, phase: int) -> None:
    """A fourth run is made, and the kernel dies in this phase."""
    kernel.event("opened", 50.0, run="../d", path="/content/runs/d", newest=None, counted=120)
    kernel.write()
    point_to(str(tmp_path / "runs" / "d"), find_attempt(str(tmp_path / "runs" / "train")))
    with (kernel.folder / f"process-{PID}" / "beacon").open("r+b") as file:
        file.seek(104)
        file.write(struct.pack("<Q", phase))


def test_a_death_in_the_cell_that_made_a_run_may_be_that_of_its_first_step(
    kernel: Attempt, tmp_path: Path
) -> None:
    """Memory that runs out in the first step is the commonest death of all: it must not be called nothing."""
    _opens_another(kernel, tmp_path, phase=0)
    verdict = story(tmp_path, "d")

    assert verdict.cause.id == "killed"
    assert verdict.cause.cascade[0].text == "no step of this run was done"
    assert verdict.where.step is None  # the count that the beacon shows is another run's


def test_a_death_between_two_cells_is_none_of_a_run_without_a_step(kernel: Attempt, tmp_path: Path) -> None:
    _opens_another(kernel, tmp_path, phase=5)

    assert story(tmp_path, "d").cause.id == "not-begun"


def test_of_runs_that_train_in_turns_the_one_announced_last_is_judged(
    kernel: Attempt, tmp_path: Path
) -> None:
    """The other may have been training too: that it had stopped is no certainty."""
    kernel.event("training", 100.0, run="../c", step=0, left=7, together=True)
    kernel.write()

    left = story(tmp_path, "b")
    assert story(tmp_path, "c").cause.id == "killed"
    assert (left.cause.id, left.cause.claim.grade) == ("left", "likely")
    assert "killed" in (left.beside or "")


def test_the_report_and_top_of_a_run_hold_its_own_checkpoints_and_end(
    kernel: Attempt, tmp_path: Path
) -> None:
    for before, name, step in ((310.0, "a", 16), (150.0, "b", 9)):
        path = f"/content/runs/{name}/checkpoints/step-{step}"
        kernel.event("save", before, what="buoy", path=path, step=step)
    kernel.write()
    (kernel.folder / "verdict.json").write_text(json.dumps(story(tmp_path, "train").to_json()))
    told = {name: report.as_json(history.read(str(tmp_path / "runs" / name))) for name in ("a", "b")}
    marks = {
        name: {mark["text"] for mark in page["timelines"]["whole"]["marks"]} for name, page in told.items()
    }
    now = state(find_attempt(str(tmp_path / "runs" / "a")), str(tmp_path / "runs" / "a"))

    assert {name: page["attempts"][0]["verdict"]["cause"]["id"] for name, page in told.items()} == {
        "a": "finished", "b": "killed",
    }  # fmt: skip
    assert [page["name"] for page in told.values()] == ["a", "b"]
    assert marks == {"a": {"checkpoint at step 16", "finished"}, "b": {"checkpoint at step 9", "killed"}}
    assert (now["status"], now["step"], now["name"]) == ("finished", 16, "a")
    assert [event["text"] for event in now["events"]] == ["checkpoint at step 16"]


def test_one_that_had_made_no_checkpoint_is_to_be_trained_again(kernel: Attempt, tmp_path: Path) -> None:
    """It saves by itself: to be told to save would be no help."""
    assert "train it again: no checkpoint had been made yet" in story(tmp_path, "b").cause.next[0]


def test_a_loop_that_announced_nothing_may_have_trained_it(tmp_path: Path) -> None:
    """Steps were counted after it was made: then nobody says that it did none."""
    attempt = Attempt(tmp_path, 9)  # whose beacon stands at step 120
    attempt.attempt.update(mode="watch", command=KERNEL)
    for name, counted in (("a", 20), ("b", 120)):
        attempt.event("opened", 500.0, run=f"../{name}", newest=None, counted=counted)
    attempt.write()
    for name in ("a", "b"):
        point_to(str(tmp_path / "runs" / name), find_attempt(str(attempt.folder.parents[1])))
    silent, idle = story(tmp_path, "a"), story(tmp_path, "b")

    assert (silent.cause.id, silent.cause.cascade) == ("killed", ())
    assert idle.cause.cascade[0].text == "no step of this run was done"


def _saved(run: Path, **about: Any) -> None:
    saver = Store(str(run)).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, about, lambda value: None, wait=True)
    saver.close()


def _opened_with_a_checkpoint(tmp_path: Path, phase: int = 0, **about: Any) -> buoy.Verdict:
    """A kernel that only made a run again, which had been saved at step 50, and was killed in this phase."""
    attempt = Attempt(tmp_path, 9)
    attempt.attempt.update(mode="watch", command=KERNEL)
    attempt.process(PID, step=0)
    attempt.samples = [{**row, "step": 0} for row in attempt.samples]
    newest = str(tmp_path / "runs" / "a" / "checkpoints" / "step-000000050")
    attempt.event("opened", 5.0, run="../a", newest=newest, counted=0)
    attempt.write()
    with (attempt.folder / f"process-{PID}" / "beacon").open("r+b") as file:
        file.seek(104)
        file.write(struct.pack("<Q", phase))
    _saved(tmp_path / "runs" / "a", step=50, **about)
    point_to(str(tmp_path / "runs" / "a"), find_attempt(str(attempt.folder.parents[1])))
    return story(tmp_path, "a")


def test_one_that_died_before_its_first_new_step_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    verdict = _opened_with_a_checkpoint(tmp_path)

    assert verdict.cause.id == "killed"
    assert verdict.cause.cascade[0].text == "no step of this run was done after step 50"
    assert verdict.cause.next[0].startswith("resume from step 50")


def test_nor_did_one_that_was_only_made_again_lose_what_it_had(tmp_path: Path) -> None:
    verdict = _opened_with_a_checkpoint(tmp_path, phase=5)

    assert verdict.cause.id == "not-begun"
    assert "opened at step 50 and did no further step" in verdict.cause.claim.text


def test_one_that_was_finished_before_is_not_to_be_gone_on_with(tmp_path: Path) -> None:
    verdict = _opened_with_a_checkpoint(tmp_path, finished=True)

    assert verdict.cause.next[0] == "nothing of its training was lost: its last checkpoint holds the end"
    assert not any("resume from" in step for step in verdict.cause.next)


def test_the_card_of_an_attempt_whose_run_was_finished_later_says_so(kernel: Attempt, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "b"
    _saved(run, step=30)
    before = story(tmp_path, "b").cause.next[0]
    _second_attempt(kernel, tmp_path)
    ends = [{"kind": "training", "run": "../b", "step": 30}, {"kind": "trained", "run": "../b", "step": 600}]
    later = kernel.folder.with_name("0002") / "events.jsonl"
    later.write_text("".join(json.dumps({**event, "finished": True}) + "\n" for event in ends))
    point_to(str(run), find_attempt(str(tmp_path / "runs" / "train"), 2))
    _saved(run, step=600, finished=True)

    assert before.startswith("resume from step 30")
    assert story(tmp_path, "train", 1).cause.next[0] == "nothing: attempt 2 finished it later, at step 600"
    (kernel.folder / "verdict.json").write_text(json.dumps(story(tmp_path, "b", 1).to_json()))
    shown = report.as_json(history.read(str(run)))["attempts"][0]["verdict"]["cause"]["next"]
    assert shown[0] == "nothing: attempt 2 finished it later, at step 600"

    _saved(run, step=700)  # trained further than it was meant to be at first
    assert story(tmp_path, "train", 1).cause.next[0].startswith("resume from step 700")
