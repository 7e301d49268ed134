"""The session's time was over."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import recent_signal, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.values import number, text

_NEAR = 0.97
_BEYOND, _BEYOND_SECONDS = 1.01, 5.0
"""Whoever enforces a limit does so when it is reached; what ran on beyond it was not ended by it."""


def judge(evidence: Evidence) -> Cause | None:
    """Likely at best: that the clock was the reason is nowhere written down."""
    limit = number(evidence.attempt.get("time_limit"))
    elapsed = _elapsed(evidence)
    if not limit or limit <= 0 or elapsed is None:
        return None
    last = max(_BEYOND * limit, limit + _BEYOND_SECONDS)
    if not _NEAR * limit <= elapsed <= last or not _taken(evidence):
        return None
    source = text(evidence.attempt.get("time_limit_source")) or "attempt.json"
    reading = Reading(
        f"{format_duration(elapsed)} of {format_duration(limit)} had passed ({source})", "attempt.json"
    )
    readings = (reading, status_reading(evidence)) if evidence.status.known else (reading,)
    return Cause(
        id="time-limit",
        claim=Claim(f"The time limit of {format_duration(limit)} was reached", "likely", readings),
        actor=Claim("the platform or scheduler that sets the limit", "likely"),
        next=(
            go_on(evidence),
            f"save before the limit: after {format_duration(0.95 * limit)} at the latest",
        ),
        survivable=True,
    )  # fmt: skip


def _taken(evidence: Evidence) -> bool:
    if evidence.status.known:
        return evidence.status.signal in (9, 15) or recent_signal(evidence, "SIGTERM") is not None
    speaker = evidence.speaker
    if speaker and speaker.note:
        return False
    return evidence.now.same_machine is False or bool(evidence.death)


def _elapsed(evidence: Evidence) -> float | None:
    """Seconds of the session, which may have begun before the attempt, until the end or the SIGTERM that came first."""
    ran = evidence.ran_for
    asked = recent_signal(evidence, "SIGTERM")
    if ran is not None and asked is not None:  # a scheduler waits half a minute before it kills
        ran = max(0.0, ran - asked.age)
    began = number(evidence.attempt.get("session_started"))
    start = number(evidence.attempt.get("wall"))
    if ran is None or began is None or start is None or not 0 <= start - began < 30 * 86400:
        return ran
    return ran + (start - began)
