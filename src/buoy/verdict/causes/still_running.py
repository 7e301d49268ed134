"""It has not died."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import how_to_continue, standing_hang
from buoy.verdict.causes.hang import starting
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.values import number


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
    words = "It is still running"
    event = standing_hang(evidence)
    if event is not None and event.get("is_quiet") is True:
        age = format_duration(number(event.get("age")))
        words = f"It is still starting, or trains without steps that buoy counts: none came in {age}"
        waits = starting(event)
        seen = f"it {waits}" if waits else "no thread was seen to wait"
        reading = Reading(seen, "events.jsonl", number(event.get("wall")))
    return Cause("still-running", Claim(words, "certain", (reading,)), next=("ask again when it has ended",))
