"""It was asked to stop (SIGTERM): a preemption, a scheduler, a person; perhaps killed when it did not stop in time."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import raised_as, recent_signal, signal_sender, status_reading, was_notebook
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade
from buoy.verdict.oom import examine

SIGTERM, SIGKILL = 15, 9
_TO_STOP = 30.0
"""A process that stops in order does so within this time of being asked, or for another reason."""


def judge(evidence: Evidence) -> Cause | None:
    """Certain when SIGTERM ended it; when something else did shortly after a SIGTERM, what else there is decides."""
    status = evidence.status
    if status.signal == SIGTERM:
        seen = recent_signal(evidence, "SIGTERM", 5.0)
        readings = (status_reading(evidence), *((seen.reading,) if seen else ()))
        return _cause(evidence, Claim("It was told to stop (SIGTERM)", "certain", readings))
    if (found := raised_as(evidence, "terminated")) is not None:
        words = "It was told to stop (SIGTERM), and its own handler ended it"
        return _cause(evidence, Claim(words, found.grade, found.evidence))
    seen = recent_signal(evidence, "SIGTERM", 60.0 if status.signal == SIGKILL else _TO_STOP)
    if seen is None:
        return None
    readings = (seen.reading, status_reading(evidence)) if status.known else (seen.reading,)
    after = format_duration(seen.age)
    if status.signal == SIGKILL:
        # Both signals are certain; that the second followed from the first is, once the kernel is ruled out.
        oom = examine(evidence, evidence.own_death)
        grade: Grade = "certain" if oom.answer == "not-oom" and oom.grade == "certain" else "likely"
        words = f"It was told to stop (SIGTERM) and killed (SIGKILL) {after} later"
        return _cause(evidence, Claim(words, grade, (*readings, *oom.evidence)))
    if status.signal is not None:
        return None
    if not status.known:
        if evidence.speaker and evidence.speaker.left_in_order:
            return _cause(
                evidence,
                Claim(f"It was told to stop (SIGTERM) and ended in order {after} later", "likely", readings),
            )
        return _cause(
            evidence, Claim("It was told to stop (SIGTERM); no later word of it", "likely", readings)
        )
    return _cause(
        evidence,
        Claim(
            f"It was told to stop (SIGTERM) and ended by itself {after} later ({status})", "likely", readings
        ),
    )


def _cause(evidence: Evidence, claim: Claim) -> Cause:
    actor = signal_sender(evidence, "SIGTERM")
    in_notebook = was_notebook(evidence)
    senders = "a notebook's restart or shutdown, " if in_notebook else ""
    ask = "look at the platform's notices"
    if not in_notebook:
        ask = f"ask the scheduler (SLURM: `sacct -j JOB`) or {ask}"
    return Cause(
        id="terminated",
        claim=claim,
        actor=actor
        or Claim(f"not recorded: {senders}a scheduler, the platform (preemption) or a person", "possible"),
        next=(
            go_on(evidence),
            f"if it was not you, {ask}",
        ),
        # What reached `buoy run` itself was meant for the whole job: starting again would defy it.
        survivable=actor is None,
    )
