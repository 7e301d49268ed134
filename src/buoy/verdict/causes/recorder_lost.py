"""The process is gone and nobody was left to record how."""

from __future__ import annotations

from buoy.units import format_duration, format_share
from buoy.verdict.causes.common import status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import describe_limit
from buoy.verdict.values import number

_TOGETHER = 3.0
"""Seconds. The recorder takes several readings in one; a busy machine lets it miss some."""


def judge(evidence: Evidence) -> Cause | None:
    """Certain that it is gone; why is unknown, and a high reading is only a possibility."""
    if evidence.death or evidence.now.same_machine is False or not evidence.attempt or evidence.never_started:
        return None
    by = " with signal 9" if evidence.status.signal == 9 else ""
    readings = [
        Reading("no death record, though this is the same boot", "attempt folder", evidence.last_wall)
    ]
    if evidence.status.known:
        readings.append(status_reading(evidence))
    silence = _seconds_unrecorded(evidence)
    is_together = silence is not None and abs(silence) <= _TOGETHER
    limit, used = describe_limit(evidence)
    actor = None
    if limit and used:
        share = Reading(f"memory last seen: {format_share(used, limit)}", "samples", evidence.last_wall)
        if used > 0.85 * limit:
            both = "both" if is_together else "it"
            actor = Claim(f"memory was nearly full: the kernel may have killed {both}", "possible", (share,))
    steps = [go_on(evidence)]
    if is_together:
        steps.append(
            "killed together means a container or session that ended: look for the platform's message"
        )
    return Cause(
        id="recorder-lost",
        claim=Claim(
            f"It is gone{by}, and no recorder saw its end: why cannot be told", "certain", tuple(readings)
        ),
        actor=actor,
        cascade=_when_the_recorder_stopped(silence),
        next=tuple(steps),
        survivable=True,
    )


def _seconds_unrecorded(evidence: Evidence) -> float | None:
    """From the recorder's last reading to the end, or to the last step where the end has no time; None: not known."""
    last = number(evidence.last_sample.get("t"))
    end = evidence.died_t
    if end is None and evidence.main is not None:
        end = evidence.main.step_t
    return end - last if end is not None and last is not None else None


def _when_the_recorder_stopped(silence: float | None) -> tuple[Claim, ...]:
    if silence is None or silence < -_TOGETHER:
        return ()  # no step came for long before either stopped: which of them was first is not known
    if silence <= _TOGETHER:
        return (Claim("the recorder stopped at the same time, within seconds", "likely"),)
    # A recorder whose disk is full writes nothing either, so its own end is not certain.
    words = f"nothing was recorded in its last {format_duration(silence)}: the recorder had stopped before it"
    return (Claim(words, "likely"),)
