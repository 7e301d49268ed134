"""A representative few of the death suite, and the suite's own sense of right and wrong.

The whole campaign is `make deaths`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deaths.ground import missing
from tests.deaths.judging import score
from tests.deaths.kind import MODES, Answer
from tests.deaths.kinds import ALL, BY_NAME
from tests.deaths.scene import PROGRAMS
from tests.deaths.trial import run_trial

SAMPLE = (
    "kernel-server-killed-watch",
    "oom-slow-leak-run",
    "oom-burst-watch",
    "sigkill-as-neighbour-is-oom-killed-run",
    "sigkill-at-90-percent-watch",
    "oom-under-bash-run",
    "sigterm-run",
    "sigint-watch",
    "segfault-watch",
    "segfault-sent-run",
    "exception-run",
    "disk-full-under-run-folder-run",
    "memory-error-watch",
    "os-exit-137-run",
    "clean-exit-watch",
    "worker-sigkill-late-run",
    "oom-under-make-run",
    "segfault-starved-watch",
    "oom-then-samples-cut-watch",
    "shm-full-by-a-plain-write-run",
    "hang-deadlock-run",
    "starved-in-a-step-at-1-percent-run",
    "slow-save-run",
    "recorder-killed-then-sigkill-watch",
    "simulated-machine-lost-run",
)


@pytest.mark.campaign
@pytest.mark.parametrize("name", SAMPLE)
def test_a_death_is_told_right_and_never_wrongly_for_certain(name: str) -> None:
    """A real program dies a real death; every evidence mode must accept what is said of it."""
    kind = BY_NAME[name]
    lacking = next(filter(None, map(missing, kind.requirements())), None)
    if lacking:
        pytest.skip(lacking)
    outcome = run_trial(kind)

    assert set(outcome.scores) == set(MODES), outcome.trouble
    said = {mode: (found.cause, found.grade, found.text) for mode, found in outcome.scores.items()}
    assert all(found.right for found in outcome.scores.values()), said
    assert outcome.alive is None or outcome.alive.right, outcome.alive


def test_a_claim_bolder_than_the_evidence_is_wrong_though_certain() -> None:
    """Naming the right cause is not enough where nothing can prove it."""
    answers = (Answer.parse("native-crash<=likely"), Answer.parse("unknown"))

    assert score(_verdict("native-crash", "likely"), answers).right
    assert score(_verdict("native-crash", "certain"), answers).wrong_certain
    assert score(_verdict("kernel-oom", "certain"), answers).wrong_certain
    assert not score(_verdict("kernel-oom", "likely"), answers).wrong_certain
    assert not score(_verdict("kernel-oom", "likely"), answers).right


def test_timidity_is_not_right_where_the_proof_is_there() -> None:
    """`at_least` asks for the grade that the evidence allows."""
    answers = (Answer.parse("kernel-oom"),)

    assert not score(_verdict("kernel-oom", "possible"), answers, at_least="certain").right
    assert score(_verdict("kernel-oom", "certain"), answers, at_least="certain").right


def test_not_telling_counts_as_no_verdict_only_where_it_could_be_told() -> None:
    """ "I cannot tell" is right for a death that cannot be told."""
    assert score(_verdict("unknown", "certain"), (Answer.parse("unknown"),)).right
    assert score(_verdict("unknown", "possible"), (Answer.parse("killed"),)).no_verdict
    assert score(None, (Answer.parse("killed"),)).no_verdict


def test_every_kind_can_be_staged_from_a_clean_checkout() -> None:
    """Programs exist, both ways of launching are well represented, and every doubt has its reason."""
    for kind in ALL:
        if kind.command[0].endswith(".py"):
            assert (PROGRAMS / kind.command[0]).is_file(), kind.name
        assert kind.name.endswith(f"-{kind.launch}"), kind.name
        answers = {answer.cause for mode in MODES for answer in kind.expected.answers(mode)}
        if answers & {"unknown", "recorder-lost"}:
            assert kind.expected.why, f"{kind.name}: why can it not be told?"
    used = {word for kind in ALL for word in " ".join(kind.command).replace("/", " ").split()}
    idle = {path.name for path in Path(PROGRAMS).glob("*.py")} - used - {"stage.py"}

    assert not idle, "programs that no kind uses"
    assert len(ALL) >= 45
    assert min(sum(kind.launch == launch for kind in ALL) for launch in ("run", "watch")) >= 20


def _verdict(cause: str, grade: str) -> dict[str, object]:
    return {"cause": {"id": cause, "claim": {"text": "", "grade": grade}}}
