"""How to go on: from which step, and what `--restart` did or did not do about it."""

from __future__ import annotations

import pytest
from folders import Attempt

from buoy.verdict.advice import step_in_name


def advice(attempt: Attempt) -> str:
    return next(
        step
        for step in attempt.verdict().cause.next
        if "resume from" in step or "save a checkpoint" in step or "train it again" in step
    )


def test_the_step_is_named_where_the_event_knows_it(attempt: Attempt) -> None:
    attempt.event("save", 12.0, what="buoy", path="runs/train/checkpoints/step-000001200", step=1200)

    assert advice(attempt).startswith(
        "resume from step 1200, saved 12 s before the end (runs/train/checkpoints/step-000001200)"
    )


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("out/checkpoint-500", 500),  # transformers
        ("lightning_logs/version_0/checkpoints/epoch=3-step=1200.ckpt", 1200),
        ("model_step_70.pt", 70),
        ("best.pt", None),
        ("checkpoint-5.pt", None),  # as often the epoch
        ("timestep5/model.pt", None),
        ("twostep3.pt", None),
    ],
)
def test_or_the_name(attempt: Attempt, path: str, step: int | None) -> None:
    attempt.event("save", 12.0, what="torch.save", path=path)
    named = f"step {step}, saved 12 s before the end ({path})"

    assert step_in_name(path) == step
    assert advice(attempt).startswith(
        f"resume from {named if step else f'{path}, saved 12 s before the end'};"
    )


def test_checkpoints_that_follow_each_other_quickly_are_no_files_of_one(attempt: Attempt) -> None:
    for step in (50, 100):
        path = f"runs/train/checkpoints/step-{step:09d}"
        attempt.event("save", 3.0 - step / 100, what="buoy", path=path, step=step)

    assert "(runs/train/checkpoints/step-000000100)" in advice(attempt)


def test_who_did_not_ask_for_restarts_is_told_of_them(attempt: Attempt) -> None:
    assert "`buoy run --restart 3 -- python train.py`" in advice(attempt)


@pytest.mark.parametrize(
    ("allowed", "words"), [(1, "its one restart is used up"), (3, "its 3 restarts are used up")]
)
def test_who_has_used_them_up_is_told_that(attempt: Attempt, allowed: int, words: str) -> None:
    attempt.attempt["restart"] = {"allowed": allowed, "done": allowed}
    attempt.event("restart", again=False, why=f"it was restarted {allowed} times already")

    assert words in advice(attempt)
    assert "buoy run --restart" not in advice(attempt)


def test_an_attempt_that_was_started_again_needs_no_command(attempt: Attempt) -> None:
    attempt.attempt["restart"] = {"allowed": 3, "done": 1}
    attempt.event("restart", again=True, why=None)

    assert advice(attempt).endswith("; buoy restarted it")


def test_why_it_was_not_started_again_is_told(attempt: Attempt) -> None:
    attempt.attempt["restart"] = {"allowed": 3, "done": 1}
    attempt.event("restart", again=False, why="it got no further than step 5 of the previous attempt")

    assert "`--restart 3` did not restart it: it got no further than step 5" in advice(attempt)


def test_before_that_is_decided_nothing_is_said_of_it(attempt: Attempt) -> None:
    """`buoy run` may have been killed too."""
    attempt.attempt["restart"] = {"allowed": 3, "done": 1}

    assert "restart" not in advice(attempt)
