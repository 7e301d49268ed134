"""It has not died."""

from __future__ import annotations

from buoy.verdict.causes.common import how_to_continue
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading


def judge(evidence: Evidence) -> Cause | None:
    """Certain: the same process, by pid and age, is there."""
    if evidence.is_dead:
        return None
    reading = Reading(
        f"process {evidence.pid} exists and is as old as the attempt",
        f"/proc/{evidence.pid}/stat",
        evidence.now.wall,
    )
    if evidence.now.stopped:
        stopped = Reading("state T: stopped", f"/proc/{evidence.pid}/stat", evidence.now.wall)
        claim = Claim(
            "It lives but is stopped (Ctrl-Z, SIGSTOP or a debugger)", "certain", (stopped, reading)
        )
        return Cause("still-running", claim, next=(how_to_continue(evidence),))
    return Cause("still-running", Claim("It is still running", "certain", (reading,)), next=(
        "ask again when it has ended",
    ))  # fmt: skip
