"""The process is gone and nobody was left to record how."""

from __future__ import annotations

from buoy.units import format_share
from buoy.verdict.causes.common import go_on, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import describe_limit


def judge(evidence: Evidence) -> Cause | None:
    """Certain that it is gone; why is unknown, and a high reading is only a possibility."""
    if evidence.death or evidence.now.same_machine is False or not evidence.attempt or evidence.never_started:
        return None
    reason = (
        "with signal 9, and the recorder was gone too"
        if evidence.status.signal == 9
        else "and the recorder with it"
    )
    readings = [
        Reading("no death record, though this is the same boot", "attempt folder", evidence.last_wall)
    ]
    if evidence.status.known:
        readings.append(status_reading(evidence))
    limit, used = describe_limit(evidence)
    actor = None
    if limit and used:
        share = Reading(f"memory last seen: {format_share(used, limit)}", "samples", evidence.last_wall)
        if used > 0.85 * limit:
            actor = Claim("memory was nearly full: the kernel may have killed both", "possible", (share,))
    return Cause(
        id="recorder-lost",
        claim=Claim(f"It is gone, {reason}: why cannot be told", "certain", tuple(readings)),
        actor=actor,
        next=(
            go_on(evidence),
            "killed together means a container or session that ended: look for the platform's message",
        ),
        survivable=True,
    )
