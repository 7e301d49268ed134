"""What is shown is what was measured: rates without pauses, whole evidence, commands that run, one duration."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from buoy.flight.attempt import Attempt, new_attempt
from buoy.flight.log import FIELDS, SampleLog
from buoy.machine.files import write_json
from buoy.verdict.model import Cause, Claim, Reading, Verdict, Where
from buoy.verdict.stacks import Frame
from buoy.view.cards import verdict_card
from buoy.view.chart import band, whole
from buoy.view.history import History, read, read_life, without_places
from buoy.view.report import page
from buoy.view.top import state
from buoy.view.verdict import place_of, render
from tests.view.folders import make_attempt

CELL = "/tmp/ipykernel_17490/2025494768.py"


def recorded(run: Path, steps: list[tuple[float, int, str]]) -> Attempt:
    """An attempt with these samples: moment, step, phase."""
    attempt = new_attempt(str(run))
    write_json(os.path.join(attempt.folder, "attempt.json"), {"t": 0.0, "wall": 1e9, "pid": 1 << 23})
    log = SampleLog(attempt.folder)
    for moment, step, phase in steps:
        values = {"t": moment, "wall": 1e9 + moment, "step": step, "phase": phase, "tree_rss": 1 << 30}
        log.add([values.get(name) for name in FIELDS])
    return attempt


def stretch(begin: float, end: float, first: int, rate: float) -> list[tuple[float, int, str]]:
    """Samples at 5 Hz of a training at this rate."""
    moments = [round(begin + 0.2 * each, 1) for each in range(round((end - begin) * 5))]
    return [(moment, first + round((moment - begin) * rate), "train") for moment in moments]


def test_a_pause_between_two_trainings_is_no_part_of_the_rate_however_few_samples_are_read(
    tmp_path: Path,
) -> None:
    """1.6 s of one, 1.2 s between two cells, then another: all that happens between two of every eight samples."""
    samples = [
        *stretch(0.2, 1.8, 1, 35.0),
        *[(1.8 + 0.2 * each, 57, "done") for each in range(6)],
        *stretch(3.0, 6.0, 1, 35.0),
    ]
    attempt = recorded(tmp_path / "run", samples)
    for every in (1, 8):
        rates = [1 / each for _, each, _ in read_life(attempt, every).series["step_seconds"]]
        assert rates and all(rate == pytest.approx(35.0, rel=0.1) for rate in rates)


def test_another_training_that_begins_at_once_is_timed_by_itself(tmp_path: Path) -> None:
    """Its first steps are above those at which the one before began to be timed."""
    samples = [*stretch(0.2, 1.8, 1, 30.0), *[(1.8 + each, 49, "train") for each in (0.0, 1.0)]]
    samples += stretch(3.0, 6.0, 10, 30.0)
    life = read_life(recorded(tmp_path / "run", samples))

    assert [1 / each for _, each, _ in life.series["step_seconds"]] == pytest.approx([30.0, 30.0], rel=0.1)


def test_the_rate_of_the_training_before_is_not_that_of_the_one_that_has_just_begun(tmp_path: Path) -> None:
    attempt = recorded(tmp_path / "run", [*stretch(0.2, 4.2, 1, 18.0), *stretch(5.0, 6.0, 1, 35.0)])
    before = state(attempt)["step_seconds"]
    with open(os.path.join(attempt.folder, "events.jsonl"), "a") as file:
        file.write(json.dumps({"kind": "training", "t": 4.9, "run": "../b", "step": 0}) + "\n")

    assert before == pytest.approx(1 / 18, rel=0.1)
    assert state(attempt)["step_seconds"] is None


def test_waiting_after_the_last_step_makes_no_step_slower(tmp_path: Path) -> None:
    samples = [*stretch(0.2, 4.2, 1, 30.0), *[(4.2 + 0.2 * each, 120, "train") for each in range(30)]]
    life = read_life(recorded(tmp_path / "run", samples))

    assert max(high for _, _, high in life.series["step_seconds"]) == pytest.approx(1 / 30, rel=0.1)


def test_the_slowest_stretch_is_drawn_as_long_as_it_took_also_at_the_end(tmp_path: Path) -> None:
    slow = [(10.2 + each, 300 + each, "train") for each in (1, 2, 3, 4)]
    samples = [*stretch(0.2, 10.2, 1, 30.0), *slow]
    life = read_life(recorded(tmp_path / "run", samples))
    values = [item for item in band(whole(History("run", "run", [life])), "step_seconds") if item]
    highest = max(high for _, high in values)
    buckets = [item for item in values if item[1] == highest]

    assert highest > 0.3
    assert len(buckets) > 0.1 * len(values)


def test_steps_too_few_to_time_are_said_to_be_missing(tmp_path: Path) -> None:
    recorded(tmp_path / "run", [*stretch(0.2, 1.6, 1, 90.0), (1.8, 139, "done"), (5.0, 139, "done")])
    text = page(read(str(tmp_path / "run")))

    assert "time per step: of its 139 steps no 2 s without a pause were recorded" in text
    assert 'data-chart="step_seconds"' not in text


def test_an_attempt_without_a_curve_is_named_below_those_that_have_one(tmp_path: Path) -> None:
    make_attempt(tmp_path / "run", 60.0)
    alone = page(read(str(tmp_path / "run")))
    recorded(tmp_path / "run", stretch(0.2, 1.6, 1, 300.0))
    text = page(read(str(tmp_path / "run")))

    assert 'data-chart="step_seconds"' in alone and "Not known for" not in alone
    assert text.count("Not known for attempt 2: that takes 2 s of steps without a pause.") == 1


def test_card_table_and_axis_tell_one_duration(tmp_path: Path) -> None:
    for _ in range(2):
        folder = make_attempt(tmp_path / "run", 27.0)
        verdict = json.loads((folder / "verdict.json").read_text())
        (folder / "verdict.json").write_text(json.dumps({**verdict, "ran_for": 28.4}))
    text = page(read(str(tmp_path / "run")))

    assert text.count("ran 28.4 s") == 2 or text.count("ran 28 s") == 2
    assert not re.search(r"\b27(\.\d)? s\b", text)


def staged(where: Where, readings: tuple[Reading, ...] = ()) -> Verdict:
    claim = Claim("It crashed: a bad memory access in native code (SIGSEGV)", "likely", readings)
    return Verdict(
        run="runs/cats", attempt=1, wall=None, ran_for=28.0, mechanism=Claim("signal 11 (SIGSEGV)", "certain"),
        cause=Cause("native-crash", claim, next=("train it again",)), where=where,
    )  # fmt: skip


def test_evidence_is_folded_to_a_narrow_terminal_not_cut() -> None:
    long = (
        "oom_kill counter of the whole machine: unchanged from 12 since the training began, so no kernel kill"
    )
    verdict = staged(Where(), (Reading(long, "death.json", None),))
    for style in ("full", "concise"):
        told = render(verdict, style, width=80)
        assert long in " ".join(told.split()) and "(death.json)" in told
        assert max(map(len, told.splitlines())) <= 80


def test_the_grade_stays_where_words_are_cut() -> None:
    actor = Claim(
        "not recorded: `kill -9`, a notebook's restart, a scheduler, an out-of-memory daemon " * 3, "possible"
    )
    verdict = staged(Where())
    verdict = replace(verdict, cause=replace(verdict.cause, actor=actor))
    for width in range(60, 101):
        told = render(verdict, width=width)
        assert "... [possible]" in told and max(map(len, told.splitlines())) <= width


def test_a_place_in_a_cell_is_named_by_the_cell() -> None:
    top = Where(step=3, cell="In [5] train()", file=CELL, line=5, function="<module>")
    within = Where(step=3, cell="In [5] train()", file=CELL, line=8, function="loss")

    assert place_of(top) == "step 3, cell In [5] train(), line 5"
    assert place_of(within) == "step 3, cell In [5] train(), line 8 of a cell in loss"
    card = verdict_card(staged(top).to_json())
    assert "line 5</div>" in card and "2025494768" not in card
    assert str(Frame(CELL, 8, "loss")) == "line 8 of a cell in loss"


def test_a_training_left_unfinished_is_not_green_and_its_mechanism_has_a_name(tmp_path: Path) -> None:
    claim = {"text": "It was left at step 7", "grade": "likely", "evidence": []}
    left = {"cause": {"id": "left", "claim": claim}, "mechanism": {"text": "none of its own"}}
    folder = make_attempt(tmp_path / "run", 60.0)
    (folder / "verdict.json").write_text(json.dumps({**left, "run": "run", "attempt": 1}))
    text = page(read(str(tmp_path / "run")))
    green = verdict_card({**left, "cause": {"id": "finished", "claim": claim}})

    assert "solid #1a7f4b" in green and "solid #1a7f4b" not in verdict_card(left)
    assert "mechanism:</span> none of its own" in verdict_card(left)
    assert 'class="mark end"' in text and 'class="key-end"' in text


def test_no_path_is_shortened_inside_a_command() -> None:
    run = '/data/here/runs/Ünï "q" & <i>'
    words = f"see: `cat '{run}/attempts/0001/process-7/fault.txt'`"
    kept = without_places(words, {"cwd": "/data/here"}, run)
    beside = without_places(words, {"cwd": "/data/here"}, "/data/here/runs/cats")
    foreign = without_places(words, {"cwd": "/elsewhere"}, "/data/other")

    assert kept == beside == "see: `cat 'runs/Ünï \"q\" & <i>/attempts/0001/process-7/fault.txt'`"
    assert foreign == "see: cat '.../process-7/fault.txt'"
