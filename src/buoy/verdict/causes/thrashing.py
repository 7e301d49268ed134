"""It lives, but spends its time waiting for memory pages to come back from disk."""

from __future__ import annotations

from buoy.text import printable
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.values import number, text

_STANDS = 600.0


def judge(evidence: Evidence) -> Cause | None:
    """Likely at most: slow steps and page faults go together, which of them came first is not recorded."""
    claim = standing(evidence)
    if claim is None or evidence.is_dead:
        return None
    return Cause("thrashing", claim, next=(
        "free memory: fewer DataLoader workers, a data set that is memory-mapped or read in pieces",
        go_on(evidence),
    ), survivable=True)  # fmt: skip


def standing(evidence: Evidence) -> Claim | None:
    """The warning of thrashing that was given in the last ten minutes of the record, as a claim."""
    for event in reversed(evidence.events_of("warning")):
        t, end = number(event.get("t")), evidence.last_t
        if event.get("alarm") == "thrashing" and t is not None and end is not None and end - t < _STANDS:
            words = printable(text(event.get("text")) or "steps slow down while pages are read back", 160)
            reading = Reading(words, "events.jsonl", number(event.get("wall")))
            return Claim(
                "Memory is so short that pages are thrown out and read back all the time",
                "likely",
                (reading,),
            )
    return None
