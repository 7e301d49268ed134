"""An allocation in RAM was refused, and Python or a framework said so."""

from __future__ import annotations

from buoy.units import format_bytes
from buoy.verdict.causes.common import raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import describe_limit
from buoy.verdict.values import count


def judge(evidence: Evidence) -> Cause | None:
    """Certain: the exception is the evidence. Why it was refused is only possible to say."""
    found = raised_as(evidence, "memory-error")
    if found is None:
        return None
    asked = found.finding.asked
    what = (
        f"An allocation of {format_bytes(asked)} of RAM was refused"
        if asked
        else "An allocation in RAM was refused"
    )
    limit, _ = describe_limit(evidence)
    available = count(evidence.last_sample.get("available"))
    readings = list(found.evidence)
    if available is not None:
        room = f"RAM available just before: {format_bytes(available)}"
        readings.append(Reading(room, "samples", evidence.last_wall))
    return Cause(
        id="memory-error",
        claim=Claim(what, found.grade, tuple(readings)),
        actor=_reason(asked, available, limit),
        cascade=found.cascade,
        next=_next(asked, available, limit),
    )


def _reason(asked: int | None, available: int | None, limit: int | None) -> Claim:
    room = min((value for value in (available, limit) if value is not None), default=None)
    if asked is not None and room is not None and asked > room:
        return Claim(f"it asked for more than there is ({format_bytes(room)})", "likely")
    return Claim("a limit on address space (`ulimit -v`), or memory that is in use by others", "possible")


def _next(asked: int | None, available: int | None, limit: int | None) -> tuple[str, ...]:
    room = min((value for value in (available, limit) if value is not None), default=None)
    if asked is not None and room is not None and asked > room:
        return (
            f"make it smaller or build it in pieces: {format_bytes(asked)} never fits into {format_bytes(room)}",
            "for data: `numpy.memmap` or a reader that yields batches instead of one array",
        )
    return (
        "`ulimit -v` shows a limit on address space; `ulimit -v unlimited` lifts it",
        "build or load the object of that line in pieces",
    )
