"""The machine, or the container, went away with everything on it."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import was_notebook
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.values import text

_FRESH = 180.0
"""A record this young (seconds), read from another host or container, may still be growing there."""
_REBOOT = 20.0
"""No machine is back from a reboot sooner."""


def judge(evidence: Evidence) -> Cause | None:
    """Certain that it is gone when this is the same host after another boot; on another host the first may yet live."""
    if evidence.death or evidence.exit or evidence.now.same_machine is not False:
        return None
    now = evidence.now
    age = now.wall - evidence.last_wall if evidence.last_wall is not None else None
    readings = [Reading("no death was recorded", "attempt folder", evidence.last_wall)]
    if now.same_boot is False:
        readings.append(
            Reading(f"boot id was {text(evidence.attempt.get('boot_id'))}, is another now", "attempt.json")
        )
    if now.same_container is False and now.same_boot is not False:
        readings.append(Reading("process 1 is another than at the start", "attempt.json"))
    if now.same_host is False:
        host = text(evidence.attempt.get("hostname"))
        readings.append(Reading(f"it ran on host {host}, this is another", "attempt.json"))
    grade: Grade = "likely"
    if now.same_boot is False and now.same_host is not False:
        # Only two machines of one name that write into one folder could deceive us, and only while both live.
        grade = "certain" if age is None or age > _REBOOT else "likely"
    elif not now.sees_inside and age is not None and age < _FRESH:
        return None
    last = f"; last sign of life {format_duration(max(0.0, age))} ago" if age is not None else ""
    return Cause(
        id="machine-lost",
        claim=Claim(f"The machine or container it ran on is gone{last}", grade, tuple(readings)),
        actor=Claim(
            "the platform: lifetime or idle limit, preemption, or a crash of the machine", "possible"
        ),
        next=(
            go_on(evidence),
            "keep a copy on a mounted drive: `buoy.Run(..., mirror=DIR)`"
            if was_notebook(evidence)
            else "keep checkpoints on a mounted drive; `--mirror DIR` keeps the flight log there too",
        ),
        survivable=True,
    )
