"""Whether a recording still grows: by the process it is about, not by the age of its files, which a copy makes new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from buoy.flight import stall
from buoy.verdict.now import observe

if TYPE_CHECKING:
    from buoy.verdict.evidence import Evidence
    from buoy.verdict.model import Cause

RUNNING, STOPPED = "running", "stopped"
STALLS = {"blocked": "hangs", "starved": "starved", "network": "waits", "disk": "waits", "sleep": "waits"}
"""The state of a process that took no step for far too long, by what its threads did."""
MAY_HANG = "may hang"
"""The same of one that computes, or wakes up now and then."""
NOT_SEEN = "not seen from here"
"""The state of an attempt without an end that was recorded on another machine: it may live there, or not."""


def is_alive(about: dict[str, Any]) -> bool:
    """Whether the process that attempt.json tells of lives here."""
    return observe(about).alive


def state_of_living(about: dict[str, Any], events: list[dict[str, Any]], step: int | None) -> str:
    """`running`, unless it is stopped, or a hang was noticed and no step came since.

    The judge's own words would say the same, and cost a live view all of its causes.
    """
    if observe(about).stopped:
        return STOPPED
    hang = stall.standing(events)
    if hang is None or hang.get("is_quiet") is True or (hang.get("step") or 0) != (step or 0):
        return RUNNING
    return STALLS.get(stall.state_of(hang), MAY_HANG)


def is_out_of_sight(evidence: Evidence, cause: Cause) -> bool:
    """Whether it may live on another machine: no end was recorded, and nothing shows from here that it is gone."""
    has_end = evidence.death or evidence.exit or evidence.is_death_damaged or evidence.events_of("end")
    if evidence.now.same_machine is not False or has_end:
        return False
    is_known = cause.claim.grade == "certain" or evidence.now.sees_inside
    return cause.id in ("unknown", "machine-lost") and not is_known


def recorder_lives(about: dict[str, Any], events: list[dict[str, Any]]) -> bool | None:
    """Whether the sidecar that began last is still there; None where its process cannot be seen from here."""
    from buoy.machine import procfs

    pid = next((event.get("sidecar") for event in reversed(events) if event.get("kind") == "start"), None)
    now = observe(about)
    if not isinstance(pid, int) or now.sees_inside or now.same_machine is not True:
        return None
    stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{pid}/stat"))
    is_there = stat is not None and stat.state not in ("Z", "X")
    return is_there and b"sidecar.py" in procfs.read_bytes(f"/proc/{pid}/cmdline")
