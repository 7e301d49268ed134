"""It ended well."""

from __future__ import annotations

from buoy.verdict.causes.common import left_in_a_cell, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading


def judge(evidence: Evidence) -> Cause | None:
    """Certain with exit code 0. Without a code: likely if the script came to its last line, else only possible."""
    if left_in_a_cell(evidence):
        return None
    speaker = evidence.speaker
    if evidence.status.exit_code == 0:
        readings = [status_reading(evidence)]
        if speaker and speaker.left_in_order:
            readings.append(Reading("the interpreter shut down in order", speaker.source))
        return Cause(
            "clean-exit",
            Claim("It ended by itself with exit code 0", "certain", tuple(readings)),
            None,
            _left(evidence),
        )
    if evidence.status.known or speaker is None or not speaker.note or speaker.note.get("kind") != "exit":
        return None
    reading = Reading("the interpreter shut down in order; the exit code was not read", speaker.source)
    return Cause("clean-exit", _without_a_code(speaker.note.get("finished"), reading), None, _left(evidence))


def _without_a_code(finished: object, reading: Reading) -> Claim:
    """`sys.exit(3)` shuts the interpreter down in order too; only a script that came to its end surely ended well."""
    if finished is True:
        last = Reading("the script came to its last line", reading.source)
        return Claim("It ended in order, at the end of the script", "likely", (last, reading))
    how = "by `sys.exit` or the like, before the end of the script" if finished is False else "in order"
    return Claim(
        f"It ended by itself, {how}; its exit code was not read, so it may have failed",
        "possible",
        (reading,),
    )


def _left(evidence: Evidence) -> tuple[Claim, ...]:
    """Descendants that run on, as after a fork that became a daemon."""
    pids = evidence.death.get("alive")
    alive = [pid for pid in pids if isinstance(pid, int)] if isinstance(pids, list) else []
    if not alive:
        return ()
    names = ", ".join(map(str, alive[:5]))
    reading = Reading(f"still running at the end: pid {names}", "death.json", evidence.died_wall)
    return (Claim(f"{len(alive)} process(es) it had started went on without it", "certain", (reading,)),)
