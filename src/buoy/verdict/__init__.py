"""Why an attempt died: evidence in, a graded verdict out.

evidence.py    what the attempt left behind, and the same with parts taken away
causes/        the causes in families, tried in one order
judge.py       the first that fits, plus mechanism, place and what held memory
select.py      which run and which attempt a question is about
notebook.py    several runs in one process: the one that was training is judged, the others are listed
advice.py      how to resume: from what was saved, by itself or by hand
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from buoy.verdict.model import Verdict

if TYPE_CHECKING:
    from buoy.verdict.evidence import Evidence
    from buoy.verdict.select import Asked

__all__ = ["Verdict", "settle", "verdict_on", "why"]


def why(run: str | None = None, attempt: int | None = None) -> Verdict:
    """What killed the last attempt of a run (by default the newest run here), how sure that is, and what to do.

    >>> import buoy, subprocess, sys
    >>> command = ["-m", "buoy", "run", "--run", "runs/cats", "--", sys.executable, "-c", "import os; os._exit(3)"]
    >>> subprocess.run([sys.executable, *command], stderr=subprocess.DEVNULL).returncode
    3
    >>> verdict = buoy.why("runs/cats")
    >>> verdict.cause.id, verdict.cause.claim.grade
    ('exit-code', 'certain')
    """
    from buoy.verdict.select import asked_for, beside

    asked = asked_for(run, attempt)
    verdict = verdict_on(asked)
    was_chosen = attempt is not None or os.path.basename(os.path.normpath(run or "")).isdigit()
    return verdict if was_chosen else beside(verdict, asked)


def verdict_on(asked: Asked, evidence: Evidence | None = None, judged: Verdict | None = None) -> Verdict:
    """The verdict on what is asked for; of a process that ended it names the run that was training.

    A notebook's kernel outlives its trainings: where it was at none of them, its own end is reported and they are
    listed.
    `judged`: what was found of the process already, by this evidence.
    """
    from buoy.verdict.advice import NOT_BEGUN
    from buoy.verdict.evidence import load
    from buoy.verdict.judge import judge
    from buoy.verdict.notebook import of_kernel, of_run, part_in
    from buoy.verdict.select import concerned

    evidence = evidence or load(asked.attempt.folder)
    judged = judged or judge(evidence)
    if not asked.of_process or not evidence.is_dead:
        return of_run(judged, evidence, asked.run)
    run = concerned(asked.attempt)
    if evidence.is_kernel:
        own, story = part_in(evidence, run)
        if story not in (None, NOT_BEGUN) or not (own.opened or own.began):
            return of_kernel(judged, evidence)
    return of_run(judged, evidence, run, whole=True)


def settle(folder: str) -> Verdict:
    """Judge an attempt that has just died and write its verdict.json, whole or not at all."""
    from buoy.verdict.evidence import load
    from buoy.verdict.judge import judge

    verdict = judge(load(folder))
    record(verdict, folder)
    return verdict


def record(verdict: Verdict, folder: str) -> None:
    """Write an attempt's verdict.json."""
    from buoy.machine.files import write_json

    write_json(os.path.join(folder, "verdict.json"), verdict.to_json())


def settled(folder: str) -> Verdict | None:
    """The verdict that the sidecar settled on; None where it has none, or did not learn how the process ended."""
    from buoy.machine.files import read_json

    verdict = Verdict.from_json(read_json(os.path.join(folder, "verdict.json")))
    return verdict if verdict is not None and verdict.mechanism.grade == "certain" else None
