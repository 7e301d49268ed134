"""RAM that had stood at its limit is part of every verdict, with the variables that held it; what was over is not."""

from __future__ import annotations

from typing import Any

import pytest
from folders import DIED_T, DIED_WALL, GIB, PID, Attempt, exited, note

from buoy.view.cards import verdict_card
from buoy.view.verdict import FULL_LINES, render

IMAGES = {
    "name": "images", "bytes": 3 * GIB // 2, "what": "list of 41,200 NumPy arrays", "place": "load, train.py:31",
    "device": "",
}  # fmt: skip
ON_GPU = {"name": "cache", "bytes": GIB, "what": "list of 9 tensors", "place": "", "device": "cuda:0"}


def stands(attempt: Attempt, share: float = 0.98, until: float = 0.0, step: int = 0) -> None:
    """Ten minutes at ten samples a second: the last nine of them high, until so many seconds before the end."""
    row = attempt.samples[-1]
    attempt.samples = []
    for n in range(6000):
        before = 600 - n / 10
        used = share * 2 * GIB if until <= before <= 540 else GIB
        attempt.samples.append(
            {**row, "t": DIED_T - before, "wall": DIED_WALL - before, "cgroup_used": int(used), "step": step}
        )
    attempt.event("warning", 530, alarm="ram-level", text="RAM has been at ...", values={})


def holders(attempt: Attempt, before: float = 520.0, **values: Any) -> None:
    answer: dict[str, Any] = {
        "variables": [IMAGES, ON_GPU], "resident": 2 * GIB, "found": 3 * GIB // 2, "outside": GIB // 2,
        "pipelines": [], "graphs": [], "is_partial": False, "pid": PID, "children": 0, "children_bytes": 0,
    }  # fmt: skip
    attempt.event("holders", before, **{**answer, **values})


ENDS: dict[str, int | None] = {"terminated": 15, "killed": 9, "interrupted": 2, "exit-code": exited(3)}


@pytest.mark.parametrize("cause", ENDS)
def test_whatever_ended_it_the_verdict_says_that_memory_was_full_and_no_step_came(
    attempt: Attempt, cause: str
) -> None:
    assert attempt.death is not None
    attempt.death["status"]["raw"] = ENDS[cause]
    attempt.process(PID, step=0)
    stands(attempt)
    holders(attempt)

    verdict = attempt.verdict()

    assert verdict.cause.id == cause
    before = verdict.cause.cascade[0]
    assert before.text == (
        "RAM had been at 98 % of its limit of 2.0 GiB for 9 min of the last 10 min; no step was ever counted"
    )
    assert before.grade == "certain"
    assert verdict.cause.next[0] == (
        "hold less in images (list of 41,200 NumPy arrays, 1.5 GiB) in load, train.py:31: "
        "read it in pieces, or memory-map it"
    )
    assert (verdict.holders[0].name, verdict.holders[0].bytes) == ("images", 3 * GIB // 2)
    assert "read 8 min 40 s before the end" in str(verdict.holders[0].detail)
    text, card = render(verdict, width=100), verdict_card(verdict.to_json())
    assert len(text.splitlines()) <= FULL_LINES
    for shown in (text.replace("\n           ", " "), card):
        assert (
            "9 min of the last 10 min" in shown
            and "list of 41,200 NumPy arrays, in load, train.py:31" in shown
        )
    if cause != "killed":  # whose own words leave no room for it in so few lines
        assert "before: RAM had been at 98 %" in render(verdict, "concise", width=100)


def test_steps_that_came_are_not_denied(attempt: Attempt) -> None:
    stands(attempt, step=120)
    stood = attempt.verdict().cause.cascade[0].text
    for n, row in enumerate(attempt.samples):
        row["step"] = n
    stepped = attempt.verdict().cause.cascade[0].text

    assert stood.endswith("of the last 10 min; no step was counted in that time")
    assert stepped.endswith("for 9 min of the last 10 min")


def test_a_living_one_is_told_with_what_goes_on_now(attempt: Attempt) -> None:
    attempt.alive()
    attempt.process(attempt.attempt["pid"], step=0)
    stands(attempt)
    holders(attempt)
    verdict = attempt.verdict()

    assert verdict.cause.id == "still-running"
    assert "It is still running. RAM has been at 98 % of its limit of 2.0 GiB" in verdict.cause.claim.text
    assert verdict.cause.next[0].startswith("hold less in images")
    assert "ago" in str(verdict.holders[0].detail)


@pytest.mark.parametrize("why", ["over", "lower", "no warning"])
def test_memory_that_was_not_full_at_the_end_is_no_part_of_it(attempt: Attempt, why: str) -> None:
    stands(attempt, 0.9 if why == "lower" else 0.98, until=200 if why == "over" else 0)
    if why == "no warning":
        attempt.events = [event for event in attempt.events if event["kind"] != "warning"]
    assert attempt.death is not None
    attempt.death["status"]["raw"] = 15
    verdict = attempt.verdict()

    assert verdict.cause.cascade == () and verdict.holders == ()
    assert "RAM" not in " ".join(verdict.cause.next)


def test_a_training_that_ended_well_is_left_in_peace(attempt: Attempt) -> None:
    assert attempt.death is not None
    attempt.death["status"]["raw"] = 0
    attempt.process(PID, {"kind": "exit"})
    stands(attempt)

    assert attempt.verdict().cause.cascade == ()


PIPELINES = ["cache() of ds", "shuffle(60000) of ds"]
ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "buffers of tf.data": (
        {"variables": [], "outside": 3 * GIB // 2, "pipelines": PIPELINES},
        'cache() of ds and shuffle(60000) of ds keep their elements in RAM: cache into a file (`.cache("cache")`)',
    ),
    "graphs": (
        {"variables": [], "outside": 3 * GIB // 2, "graphs": ["losses"]},
        "losses keeps tensors with the graphs they were computed by: keep `loss.item()` instead",
    ),
    "a model": (
        {"variables": [{**IMAGES, "name": "net", "what": "Net", "place": ""}]},
        "hold less in net (Net, 1.5 GiB)",
    ),
    "its workers": (
        {"children": 4, "children_bytes": 5 * GIB},
        "it filled the RAM before its first step",
    ),
    "nothing": ({"error": "Python did not answer"}, "it filled the RAM before its first step"),
}


@pytest.mark.parametrize("what", ADVICE)
def test_advice_is_about_what_held_it(attempt: Attempt, what: str) -> None:
    attempt.process(PID, step=0)
    stands(attempt)
    values, words = ADVICE[what]
    holders(attempt, **values)
    verdict = attempt.verdict()

    assert verdict.cause.next[0].startswith(words)
    if what == "nothing":
        assert verdict.holders[0].bytes is None
        assert "could not be read 8 min 40 s before the end: Python did not answer" in str(
            verdict.holders[0].detail
        )
    if what == "buffers of tf.data":
        assert "where tf.data keeps the elements of cache() of ds" in str(verdict.holders[0].detail)


def test_a_kernel_kill_names_what_was_read_before_it_and_not_what_is_long_ago(attempt: Attempt) -> None:
    attempt.oom_killed()
    holders(attempt, 4.0)
    named = attempt.verdict()
    attempt.events.pop()
    holders(attempt, 7200.0)
    old = attempt.verdict()

    assert named.holders[0].name == "images" and named.cause.next[0].startswith("hold less in images")
    assert old.holders[0].name != "images"


def test_the_memory_of_a_gpu_is_named_by_the_tensors_there(attempt: Attempt) -> None:
    assert attempt.death is not None
    attempt.death["status"]["raw"] = exited(1)
    attempt.process(PID, note("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."))
    holders(attempt, 3.0)
    verdict = attempt.verdict()

    assert verdict.cause.id == "gpu-oom"
    assert (verdict.holders[0].name, verdict.holders[0].detail) == (
        "cache", "list of 9 tensors on cuda:0; read 3 s before the end",
    )  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        {"variables": "many"}, {"variables": [1, {}, {"name": 3}, {**IMAGES, "bytes": "x"}]}, {"resident": "all"},
        {"outside": None, "resident": None}, {"pipelines": 7, "graphs": {"a": 1}}, {"children": "x"},
    ],
)  # fmt: skip
def test_a_damaged_answer_is_no_answer(attempt: Attempt, damage: dict[str, Any]) -> None:
    stands(attempt)
    holders(attempt, **damage)
    verdict = attempt.verdict()

    assert verdict.cause.id == "killed" and render(verdict)
