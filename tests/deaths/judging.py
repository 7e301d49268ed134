"""Asking for verdicts, and scoring them against what was really done."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.deaths.kind import GRADES, MODES, Answer, Kind

CANNOT_TELL = ("unknown", "recorder-lost", "still-running", "none")


@dataclass(frozen=True, slots=True)
class Score:
    """What was said in one evidence mode, and whether it was right."""

    cause: str
    grade: str
    text: str
    right: bool
    wrong_certain: bool
    no_verdict: bool
    """It said that it cannot tell, of a death that can be told."""


def judge_folder(folder: Path, mode: str = "full") -> dict[str, Any]:
    """The verdict on a recording, with the evidence that this mode leaves."""
    from buoy.verdict.evidence import load
    from buoy.verdict.judge import judge

    evidence = load(str(folder))
    return judge(evidence if mode == "full" else evidence.without(mode)).to_json()


def written_verdict(folder: Path) -> dict[str, Any] | None:
    """The verdict that was left on disk."""
    try:
        found: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    except (OSError, ValueError):
        return None
    return found


def right_answers(kind: Kind, folder: Path, mode: str) -> tuple[Answer, ...]:
    """What may be said in this mode; an old kernel takes nothing where the status was learnt otherwise."""
    if mode == "old-kernel" and _status_source(folder) != "pidfd":
        return (*kind.expected.full, *_of_children(kind))
    return kind.expected.answers(mode)


def _of_children(kind: Kind) -> tuple[Answer, ...]:
    # Under `buoy run` the main status is always exact; those of its children may still be lost.
    return kind.expected.old_kernel if kind.launch == "run" else ()


def _status_source(folder: Path) -> str | None:
    try:
        source: str | None = json.loads((folder / "death.json").read_text())["status"]["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return source


def score(
    verdict: dict[str, Any] | None,
    answers: tuple[Answer, ...],
    at_least: str | None = None,
    coarse: tuple[str, ...] = (),
) -> Score:
    """Compare what was said with what may be said."""
    if verdict is None:
        return Score("none", "", "no verdict at all", right=False, wrong_certain=False, no_verdict=True)
    cause, claim = verdict["cause"]["id"], verdict["cause"]["claim"]
    grade = claim["grade"]
    fitting = [answer for answer in answers if answer.cause == cause]
    bold = fitting and GRADES.index(grade) > max(GRADES.index(answer.at_most) for answer in fitting)
    timid = at_least is not None and GRADES.index(grade) < GRADES.index(at_least)
    right = bool(fitting) and not bold and not timid
    return Score(
        cause,
        grade,
        claim["text"],
        right=right,
        wrong_certain=grade == "certain" and (bool(bold) if fitting else cause not in coarse),
        no_verdict=not right and not fitting and cause in CANNOT_TELL,
    )


def mechanism_is_true(verdict: dict[str, Any], code: int, launch: str) -> bool:
    """Whether a mechanism called certain is the one the campaign itself saw: its child's code, -N for signal N."""
    said = verdict["mechanism"]
    if said["grade"] != "certain":
        return True
    if code < 0:
        return f"signal {-code} " in said["text"]
    true = [f"exit code {code}", *([f"signal {code - 128} "] if launch == "run" and code > 128 else [])]
    return any(words in said["text"] for words in true)


def complete(kind: Kind, verdict: dict[str, Any], found: Score) -> Score:
    """The score, less if the verdict leaves out something that this kind must be told with."""
    if kind.says not in json.dumps(verdict):
        return replace(found, right=False, text=f"{found.text} (without the words {kind.says!r})")
    if (verdict["where"]["step"] or 0) < kind.steps:
        return replace(found, right=False, text=f"{found.text} (at step {verdict['where']['step']})")
    return found


def score_modes(kind: Kind, folder: Path, verdict: dict[str, Any]) -> dict[str, Score]:
    """The scores of one recording in every evidence mode; `full` is what was said at the time."""
    expected = kind.expected
    said = score(verdict, expected.full, expected.at_least, expected.coarse)
    scores = {"full": complete(kind, verdict, said)}
    for mode in MODES[1:]:
        answers = right_answers(kind, folder, mode)
        # With nothing but notes the recorder is lost by definition: to say so is no lie, if no help either.
        coarse = (*expected.coarse, "recorder-lost") if mode == "notes-only" else expected.coarse
        scores[mode] = score(judge_folder(folder, mode), answers, coarse=coarse)
    return scores
