"""Somebody pressed Ctrl-C or Stop."""

from __future__ import annotations

from buoy.verdict.causes.common import raised_as, recent_signal, signal_sender, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading

SIGINT = 2


def judge(evidence: Evidence) -> Cause | None:
    """Certain from the status or the KeyboardInterrupt that nobody caught."""
    signal = evidence.status.signal
    note = evidence.speaker.exception if evidence.speaker else None
    is_note = bool(note and str(note.get("type", "")).endswith(".KeyboardInterrupt"))
    readings: list[Reading] = []
    if signal == SIGINT:
        grade = "certain"
        readings.append(status_reading(evidence))
        if is_note and evidence.speaker:
            readings.append(Reading("KeyboardInterrupt", evidence.speaker.source))
    elif (found := raised_as(evidence, "interrupted")) is not None:
        grade = found.grade
        readings += found.evidence
    elif evidence.status.exit_code == 130 and (seen := recent_signal(evidence, "SIGINT", 30.0)):
        grade = "likely"
        readings += [seen.reading, status_reading(evidence)]
    else:
        return None
    return Cause(
        id="interrupted",
        claim=Claim("It was interrupted: Ctrl-C or the Stop button (SIGINT)", grade, tuple(readings)),  # type: ignore[arg-type]
        actor=signal_sender(evidence, "SIGINT"),
        next=("start it again when you are ready; nothing is wrong with it",),
    )
