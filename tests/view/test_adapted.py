"""The plan beside what came, and what was adapted: in the report, on the timeline and in its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buoy.view import chart, history, report
from buoy.view import history as changes
from tests.view.folders import GIB, add_events, make_attempt, plan


def test_the_plan_stands_beside_what_came(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "cats", 120.0)
    add_events(folder, plan(), _peak("reserved", 8 * GIB))
    (tmp_path / "cats" / "micro-batches.jsonl").write_text(
        '{"step": 0, "samples": 16}\n{"step": 9, "samples": 8}\n'
    )

    read = history.read(str(tmp_path / "cats"))
    rows = {row["what"]: row for row in report.as_json(read)["plan"]["rows"]}
    page = report.page(read)

    # The highest sample of the GPU.
    assert 8 * GIB <= rows["device memory, 16 samples at once"]["real"] <= 9 * GIB
    assert rows["host RAM"]["real"] > 2 * GIB
    assert rows["reserved by the framework"]["real"] == 8 * GIB
    assert (rows["samples at once"]["planned"], rows["samples at once"]["real"]) == (16, 8)
    assert "Plan and reality" in page
    assert "8.0 GiB to 10.0 GiB" in page
    assert "12.0 GiB: more than planned" in page  # host RAM
    assert "planned for colab-t4: does not fit; the cheapest remedy: micro-batches of 16" in page


def test_samples_at_once_are_those_that_the_run_really_used_or_unknown(tmp_path: Path) -> None:
    """A kernel trains several runs: only what this one told counts."""
    folder = make_attempt(tmp_path / "cats", 120.0)
    add_events(folder, plan(batch=512, micro_batch=None), _batch("/else/dogs", 64))

    assert _samples_at_once(tmp_path / "cats") == ("the whole batch (512)", None)

    add_events(folder, _batch("/moved/from/cats", 8), _batch("/else/dogs", 128))

    assert _samples_at_once(tmp_path / "cats") == ("the whole batch (512)", "the whole batch (8)")
    assert "n/a" not in report.page(history.read(str(tmp_path / "cats"))).split("samples at once")[-1][:80]


def _peak(what: str, real: int) -> dict[str, Any]:
    return {"kind": "peak", "what": what, "foreseen": [7 * GIB, 9 * GIB], "real": real}


def _batch(path: str, samples: int) -> dict[str, Any]:
    return {"kind": "batch", "step": 0, "samples": samples, "path": path}


def _samples_at_once(run: Path) -> tuple[Any, Any]:
    rows = report.as_json(history.read(str(run)))["plan"]["rows"]
    return next((row["planned"], row["real"]) for row in rows if row["what"] == "samples at once")


def test_a_plan_for_another_device_is_not_compared(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "cats", 120.0)
    add_events(folder, plan(device="a100-40"))

    told = report.as_json(history.read(str(tmp_path / "cats")))["plan"]

    assert told["on"] is None
    assert [row["what"] for row in told["rows"]] == ["samples at once"]
    assert "which is not where it ran" in report.page(history.read(str(tmp_path / "cats")))


def test_a_card_that_tensorflow_took_whole_says_nothing_of_the_plan(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "cats", 120.0)
    add_events(folder, plan(framework="tensorflow"), _peak("allocated", 6 * GIB))

    page = report.page(history.read(str(tmp_path / "cats")))
    rows = {row["what"]: row for row in report.as_json(history.read(str(tmp_path / "cats")))["plan"]["rows"]}

    assert rows["device memory, 16 samples at once"]["real"] is None
    assert rows["allocated by the framework"]["real"] == 6 * GIB
    assert "6.0 GiB: less than planned" in page


def test_each_adaptation_is_told_with_its_time_and_marked(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "cats", 120.0)
    add_events(
        folder,
        {"kind": "remedy", "name": "checkpointing", "blocks": 12},
        {"kind": "sized", "step": 1, "samples": 64, "of": 64},
        {"kind": "sized", "step": 1, "samples": 16, "of": 64},
        {"kind": "retry", "what": "oom", "step": 7, "samples": 16, "smaller": 8},
        {"kind": "retry", "what": "optimizer step", "step": 9, "error": "OOM"},
        {"kind": "retention", "text": "3 checkpoints do not fit: keeping the last 2"},
        {"kind": "retry", "what": "<script>alert(1)</script>"},
    )

    read = history.read(str(tmp_path / "cats"))
    told = changes.changes(read)
    page = report.page(read)
    marks = [mark for mark in chart.marks(chart.whole(read)) if mark["kind"] == "adapted"]

    assert [(each.step, each.text) for each in told[:5]] == [
        (None, "activation checkpointing switched on in 12 blocks"),
        (1, "batches of 64 are computed 16 samples at a time"),
        (7, "out of memory with 16 samples: retried in micro-batches of 8"),
        (9, "out of memory in the optimizer step: rolled back and retried"),
        (None, "3 checkpoints do not fit: keeping the last 2"),
    ]
    assert {each.at for each in told} == {60.0}
    assert all(each.text in page for each in told[:5])
    assert "<script>alert" not in page
    assert [mark["count"] for mark in marks] == [6]


@pytest.mark.parametrize(
    "event",
    [plan(answers=None), plan(answers=[7, {"device": "t4", "peak": "much"}]), {"kind": "plan"}],
    ids=["no answers", "odd answers", "nothing"],
)
def test_a_damaged_plan_breaks_no_page(tmp_path: Path, event: dict[str, Any]) -> None:
    folder = make_attempt(tmp_path / "cats", 120.0)
    add_events(folder, event, {"kind": "retry"}, {"kind": "sized"}, {"kind": "remedy"})
    (tmp_path / "cats" / "micro-batches.jsonl").write_text('7\n{"step": "x"}\n{"step": 3, "parts": [1, 2]}\n')

    page = report.page(history.read(str(tmp_path / "cats")))

    assert "Plan and reality" in page
    assert "[1, 2]" in page
