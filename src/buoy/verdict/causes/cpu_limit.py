"""It used up the CPU seconds it was allowed (RLIMIT_CPU): SIGXCPU at the soft limit, SIGKILL at the hard one."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import recent_signal, status_reading, weaker
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import examine
from buoy.verdict.values import mapping, number

SIGXCPU, SIGKILL = 24, 9
_SAMPLED = 0.5
"""The last reading may be this much (seconds) behind the death."""
_LATE = 1.5
"""A kernel without a regular tick accounts for a busy core only about once a second."""


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the signal fits and the CPU time is at the limit; the same signal sent by hand does not fit."""
    cpu = mapping(evidence.death.get("cpu"))
    used, soft, hard = (number(cpu.get(key)) for key in ("used", "soft_limit", "hard_limit"))
    known = evidence.status.known
    grade: Grade | None
    if evidence.status.signal == SIGXCPU or (
        not known and recent_signal(evidence, "SIGXCPU", 5.0) is not None
    ):
        grade, limit = _at(evidence, used, soft), soft
        # The kernel raises the soft limit by a second when it sends SIGXCPU, and this may be read after that.
        if grade is None and soft is not None and soft > 1.0 and _at(evidence, used, soft - 1.0) is not None:
            grade, limit = "likely", soft - 1.0
    elif evidence.status.signal == SIGKILL or (not known and not (evidence.main and evidence.main.note)):
        grade, limit = _at(evidence, used, hard), hard
        if grade and known and examine(evidence, evidence.own_death).answer == "open":
            grade = "likely"
    else:
        return None
    if grade is None or limit is None:
        return None
    grade = grade if known else weaker(grade, "likely")
    words = f"CPU time used, last seen: {format_duration(used)} of {format_duration(limit)}"
    readings = [Reading(words, "death.json", evidence.died_wall)]
    if known:
        readings.append(status_reading(evidence))
    return Cause(
        id="cpu-limit",
        claim=Claim(
            f"It used up its limit of {format_duration(limit)} of CPU time (RLIMIT_CPU)",
            grade,
            tuple(readings),
        ),
        actor=Claim("the Linux kernel, by a limit that the shell or the batch system had set", grade),
        next=(
            "`ulimit -t` shows the limit; raise it where the job is submitted, or `ulimit -t unlimited`",
            go_on(evidence),
        ),
        survivable=True,
    )


def _at(evidence: Evidence, used: float | None, limit: float | None) -> Grade | None:
    """How surely the process had used this much CPU time when it died."""
    if used is None or limit is None:
        return None
    rusage = mapping(evidence.exit.get("rusage"))
    parts = [number(rusage.get(key)) for key in ("utime", "stime")]
    # The parent's figure is exact. It counts reaped children too, so it can clear the limit but not prove it.
    exact = sum(part for part in parts if part is not None) if None not in parts else None
    if exact is not None and exact < limit - 0.2:
        return None
    if limit - _SAMPLED <= used:
        return "certain"
    return "likely" if used >= max(limit / 4, limit - _LATE) else None
