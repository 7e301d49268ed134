"""It used up the CPU seconds it was allowed (RLIMIT_CPU): SIGXCPU at the soft limit, SIGKILL at the hard one."""

from __future__ import annotations

import os

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
ADVICE = "`ulimit -t` shows the limit; raise it where the job is submitted, or `ulimit -t unlimited`"
_TICKS_AHEAD = 0.7
"""The kernel counts whole ticks for its limit: it kills who has used four fifths of it by the exact count."""
_READ_EVERY = 1.0
_LATE = 1.5
"""A kernel without a regular tick accounts for a busy core only about once a second."""


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the signal fits and the CPU time is at the limit; the same signal sent by hand does not fit."""
    cpu = mapping(evidence.death.get("cpu"))
    used, hard = number(cpu.get("used")), number(cpu.get("hard_limit"))
    known = evidence.status.known
    grade: Grade | None
    if evidence.status.signal == SIGXCPU or (
        not known and recent_signal(evidence, "SIGXCPU", 5.0) is not None
    ):
        grade, limit = _at_soft_limit(evidence, used, cpu)
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
        next=(ADVICE, go_on(evidence)),
        survivable=True,
    )


def _at_soft_limit(
    evidence: Evidence, used: float | None, cpu: dict[str, object]
) -> tuple[Grade | None, float | None]:
    """How surely SIGXCPU was the kernel's, and which limit had been reached.

    The kernel raises the soft limit by a second when it sends the signal.
    """
    soft, before = number(cpu.get("soft_limit")), number(cpu.get("soft_before"))
    if soft is not None and before is not None and soft == before + 1.0:
        return "certain", before
    for limit in (soft, soft - 1.0 if soft is not None and soft > 1.0 else None):
        grade = _at(evidence, used, limit)
        if grade is not None:
            return (grade if limit == soft else "likely"), limit
    # Nobody else sends this signal, but by hand.
    return ("likely" if may_have_reached(evidence, soft) else None), soft


def may_have_reached(evidence: Evidence, limit: float | None) -> bool:
    """Whether nothing speaks against it that this limit was reached: half of it was used, as far as that is known."""
    used, exact = number(mapping(evidence.death.get("cpu")).get("used")), _exact(evidence)
    most = (used or 0.0) + _unread(evidence)
    return limit is not None and (most if exact is None else min(exact, most)) >= limit / 2


def _unread(evidence: Evidence) -> float:
    """CPU seconds that may have been used since the last reading: several threads use several in one."""
    return (_READ_EVERY + (number(evidence.death.get("gap")) or 0.0)) * (os.cpu_count() or 1)


def _exact(evidence: Evidence) -> float | None:
    """The parent's figure. It counts reaped children too, so it can clear the limit but not prove it."""
    rusage = mapping(evidence.exit.get("rusage"))
    parts = [number(rusage.get(key)) for key in ("utime", "stime")]
    return sum(part for part in parts if part is not None) if None not in parts else None


def _at(evidence: Evidence, used: float | None, limit: float | None) -> Grade | None:
    """How surely the process had used this much CPU time when it died."""
    if used is None or limit is None:
        return None
    exact = _exact(evidence)
    if exact is not None and exact < limit - 0.2:
        return "likely" if exact >= _TICKS_AHEAD * limit else None
    if limit - _SAMPLED <= used:
        return "certain"
    return "likely" if used >= max(limit / 4, limit - _LATE) else None
