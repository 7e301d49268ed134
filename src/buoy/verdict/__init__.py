"""Why an attempt died: evidence in, a graded verdict out.

evidence.py    what the attempt left behind, and the same with parts taken away
causes/        one file per cause, tried in order
lost_child.py  what an exception says of a child process that is gone
saved.py       what a training can go on from
going_on.py    how to go on, in words
own_story.py   a run's own end within a recording that holds others
kernel_end.py  a kernel's end beside the ends that its runs had had before
asked.py       which run is meant where none is named
beside.py      other attempts of the run: one that lived at the same time, the one before one that lives
judge.py       the first that fits, plus mechanism, place and memory holders
"""

from __future__ import annotations

import os

from buoy.verdict.model import Verdict

__all__ = ["Verdict", "settle", "why"]


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
    from buoy.verdict.asked import asked_for
    from buoy.verdict.beside import beside, tell

    asked = asked_for(run, attempt)
    verdict = tell(asked)
    was_chosen = attempt is not None or os.path.basename(os.path.normpath(run or "")).isdigit()
    return verdict if was_chosen else beside(verdict, asked)


def settle(folder: str) -> Verdict:
    """Judge an attempt that has just died and write its verdict.json, whole or not at all."""
    from buoy.machine.records import write_json
    from buoy.verdict.evidence import load
    from buoy.verdict.judge import judge

    verdict = judge(load(folder))
    write_json(os.path.join(folder, "verdict.json"), verdict.to_json())
    return verdict
