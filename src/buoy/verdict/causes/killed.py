"""Somebody sent SIGKILL, and it was not the kernel's OOM killer."""

from __future__ import annotations

from buoy.units import format_bytes
from buoy.verdict.causes import cpu_limit
from buoy.verdict.causes.common import is_relay, status_reading, weaker
from buoy.verdict.causes.exit_code import after_timeout
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim
from buoy.verdict.oom import describe_limit, examine
from buoy.verdict.time_command import time_command
from buoy.verdict.values import mapping, number

SIGKILL = 9


def judge(evidence: Evidence) -> Cause | None:
    """Certain only if the kernel's counters were readable and unchanged, or its log accounts for every kill."""
    if evidence.status.signal != SIGKILL or not evidence.death:
        return None
    finding = examine(evidence, evidence.own_death)
    if finding.answer != "not-oom":
        return None
    done = (
        ", while it was shutting down in order" if evidence.speaker and evidence.speaker.left_in_order else ""
    )
    limit, peak = describe_limit(evidence)
    high = (
        f" (high memory, {format_bytes(peak)}, is no proof of one)"
        if limit and peak and peak > 0.8 * limit
        else ""
    )
    claim = Claim(
        f"Somebody killed it with SIGKILL{done}; it was no kernel OOM kill{high}",
        weaker(finding.grade, "likely") if _may_be_its_own(evidence) else finding.grade,
        (status_reading(evidence), *finding.evidence),
    )
    timer = time_command(evidence.attempt.get("command"))
    if timer is not None and timer.kills and (evidence.ran_for or 0.0) >= timer.seconds:
        actor = Claim(f"`timeout {timer.word}` itself: its time was over", "likely")
        return Cause("killed", claim, actor, next=after_timeout(evidence, timer), survivable=True)
    return Cause(
        id="killed",
        claim=claim,
        actor=Claim("not recorded: `kill -9`, a notebook's restart, a scheduler, an out-of-memory daemon in user space",
                    "possible"),
        next=(go_on(evidence), "if it was not you: look for a scheduler's or platform's message at that time"),
        survivable=True,
    )  # fmt: skip


def _may_be_its_own(evidence: Evidence) -> bool:
    """Whether the kernel may have killed it for its CPU time, or it itself because its command had been killed."""
    if cpu_limit.may_have_reached(evidence, number(mapping(evidence.death.get("cpu")).get("hard_limit"))):
        return True
    if is_relay(evidence) is None:
        return any(child.status.signal == SIGKILL for child in evidence.child_deaths)
    return is_relay(evidence) is True
