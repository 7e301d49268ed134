"""It used up the CPU seconds it was allowed (RLIMIT_CPU): SIGXCPU at the soft limit, SIGKILL at the hard one."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import go_on, recent_signal, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import examine
from buoy.verdict.values import mapping, number

SIGXCPU, SIGKILL = 24, 9
_SLACK = 1.0


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the signal fits and the CPU time used is the limit; the same signal sent by hand does not fit."""
    cpu = mapping(evidence.death.get("cpu"))
    used, soft, hard = (number(cpu.get(key)) for key in ("used", "soft_limit", "hard_limit"))
    rusage = mapping(evidence.exit.get("rusage"))
    waited = [value for key in ("utime", "stime") if (value := number(rusage.get(key))) is not None]
    # The parent's figure is exact but counts children too, so it can only support a limit, not prove it.
    exact = sum(waited) if len(waited) == 2 else None
    signal = evidence.status.signal
    xcpu = signal == SIGXCPU or (
        not evidence.status.known and recent_signal(evidence, "SIGXCPU", 5.0) is not None
    )
    limit = soft if xcpu else hard if signal == SIGKILL or not evidence.status.known else None
    if limit is None or not (xcpu or evidence.death):
        return None
    grade: Grade
    if used is not None and used >= limit - _SLACK:
        grade = "certain" if evidence.status.known else "likely"
    elif exact is not None and exact >= limit - _SLACK:
        grade = "likely"
    else:
        return None
    if signal == SIGKILL and examine(evidence, evidence.own_death).answer == "open":
        grade = "likely"
    spent = used if used is not None and used >= limit - _SLACK else exact
    words = f"CPU time used: {format_duration(spent)} of {format_duration(limit)}"
    return Cause(
        id="cpu-limit",
        claim=Claim(f"It used up its limit of {format_duration(limit)} of CPU time (RLIMIT_CPU)", grade,
                    (Reading(words, "death.json", evidence.died_wall), status_reading(evidence))),
        actor=Claim("the Linux kernel, by a limit that the shell or the batch system had set", grade),
        next=("`ulimit -t` shows the limit; raise it where the job is submitted, or `ulimit -t unlimited`", go_on(evidence)),
        survivable=True,
    )  # fmt: skip
