"""The server above a notebook's kernel went away, and the kernel ended itself because of it."""

from __future__ import annotations

from buoy.text import printable
from buoy.verdict.causes.common import status_reading, was_notebook
from buoy.verdict.evidence import Evidence, ParentDeath
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import examine

_POLL_SECONDS = 3.0
"""ipykernel looks for its parent once a second and leaves with code 1; a loaded machine takes its time."""


def judge(evidence: Evidence) -> Cause | None:
    """Likely: nothing but the order of the two ends tells it from an `os._exit(1)` of the same second.

    Possible when the order of the two, or the kernel's own code, is not known.
    """
    parent, main = evidence.parent_death, evidence.main
    age = evidence.parent_age
    if parent is None or age is None or age > _POLL_SECONDS:
        return None
    if not (parent.is_awaited or was_notebook(evidence)):
        return None
    if evidence.status.known and evidence.status.exit_code != 1:
        return None
    if main is not None and main.left_in_order:  # `os._exit` runs nothing on its way out
        return None
    grade: Grade = "likely" if evidence.status.known and not parent.is_together else "possible"
    who = parent_name(parent)
    readings = [Reading(f"{who} ended {_when(parent, age)}", "events.jsonl", parent.death.wall)]
    if evidence.status.known:
        readings.append(status_reading(evidence))
    return Cause(
        id="parent-lost",
        claim=Claim(
            f"The server it belonged to, {who}, was gone: a kernel then ends itself with code 1",
            grade,
            tuple(readings),
        ),
        cascade=(parent_end(evidence, parent),),
        next=(
            "read the server's own last lines, or its container's: the kernel only followed it",
            go_on(evidence),
            "start the server so that it outlives the terminal: `nohup jupyter lab &`, or inside `tmux`",
        ),
        survivable=True,
    )


def parent_name(parent: ParentDeath) -> str:
    """The parent for people."""
    return f"`{printable(parent.death.name, 40)}` (pid {parent.death.pid})"


def parent_end(evidence: Evidence, parent: ParentDeath) -> Claim:
    """How the parent ended, as far as that was seen."""
    who, death = parent_name(parent), parent.death
    reading = Reading(f"{who}: {death.status}", death.source, death.wall)
    oom = examine(evidence, death) if death.status.signal == 9 else None
    if oom is not None and oom.answer == "oom":
        return Claim(f"{who} was killed by the kernel's OOM killer", oom.grade, (*oom.evidence, reading))
    if death.status.known:
        return Claim(f"{who} ended with {death.status}", "certain", (reading,))
    return Claim(f"{who} ended; how was not seen", "certain", (reading,))


def _when(parent: ParentDeath, age: float) -> str:
    if parent.is_together:
        return "in the same moment"
    return f"{age:.2g} s before it"
