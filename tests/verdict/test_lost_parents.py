"""A process whose parent ended before it: notebook kernels follow their server, scripts mostly do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import CHILD, PID, Attempt, counters, exited, oom_line


def _kernel_that_left_with(tmp_path: Path, code: int) -> Attempt:
    attempt = Attempt(tmp_path, exited(code))
    attempt.attempt.update(
        mode="watch", command=["python", "/lib/ipykernel_launcher.py", "-f", "kernel.json"]
    )
    return attempt


def test_a_kernel_whose_server_was_killed_just_before_is_said_to_have_followed_it(tmp_path: Path) -> None:
    """ipykernel leaves with code 1 when its parent is gone; only the order of the two ends tells, so it is likely."""
    attempt = _kernel_that_left_with(tmp_path, 1)
    attempt.event("parent-death", 0.7, pid=CHILD, name="jupyter-lab", status=9, awaited=True, together=False)
    verdict = attempt.verdict()

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("parent-lost", "likely")
    assert "jupyter-lab" in verdict.cause.claim.text
    assert "signal 9" in verdict.cause.cascade[0].text
    assert not any("sys.exit" in step for step in verdict.cause.next)


@pytest.mark.parametrize(
    ("code", "before", "note_"),
    [(3, 0.7, None), (1, 30.0, None), (1, 0.7, {"kind": "exit"})],
    ids=["another code", "long before", "an orderly exit"],
)
def test_a_kernel_that_left_for_another_reason_keeps_its_own_verdict(
    tmp_path: Path, code: int, before: float, note_: dict[str, str] | None
) -> None:
    attempt = _kernel_that_left_with(tmp_path, code)
    attempt.process(PID, note_)
    attempt.event("parent-death", before, pid=CHILD, name="jupyter-lab", status=9, awaited=True)

    assert attempt.verdict().cause.id == "exit-code"


def test_a_script_that_left_just_after_its_shell_is_told_with_that_and_nothing_more(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, exited(1))
    attempt.event("parent-death", 0.7, pid=CHILD, name="bash", status=9, awaited=False)
    verdict = attempt.verdict()

    assert verdict.cause.id == "exit-code"
    assert "`bash`" in verdict.cause.cascade[0].text and "had ended" in verdict.cause.cascade[0].text


def test_two_ends_seen_in_one_look_are_in_no_known_order(tmp_path: Path) -> None:
    attempt = _kernel_that_left_with(tmp_path, 1)
    attempt.event("parent-death", 0.0, pid=CHILD, name="jupyter-lab", status=9, awaited=True, together=True)

    assert attempt.verdict().cause.claim.grade == "possible"


def test_a_server_that_the_kernel_killed_for_memory_is_named_so(tmp_path: Path) -> None:
    attempt = _kernel_that_left_with(tmp_path, 1)
    attempt.event(
        "parent-death", 0.7, pid=CHILD, name="jupyter-lab", status=9, awaited=True, together=False,
        counters=counters((3, 4), (7, 8)), kernel_log=[oom_line(CHILD)],
    )  # fmt: skip
    first = attempt.verdict().cause.cascade[0]

    assert "OOM killer" in first.text and first.grade == "certain"
