"""It ended well."""

from __future__ import annotations

from buoy.verdict.causes.common import left_in_a_cell, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import examine
from buoy.verdict.values import printable

_AT_SHUTDOWN = (1, 2, 13, 15)
"""Signals that end a child in order: asked by its parent, or its reader had enough."""


def judge(evidence: Evidence) -> Cause | None:
    """Certain with exit code 0. An orderly shutdown without a code is likely one: `sys.exit(3)` looks the same."""
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
            (*_lost(evidence), *_left(evidence)),
        )
    if evidence.status.known or speaker is None or not speaker.note or speaker.note.get("kind") != "exit":
        return None
    code = speaker.note.get("code")
    if isinstance(code, int) and code != 0:
        return None
    reading = Reading("the interpreter shut down in order; the exit code was not read", speaker.source)
    return Cause(
        "clean-exit",
        Claim("It ended in order, probably well", "likely", (reading,)),
        None,
        (*_lost(evidence), *_left(evidence)),
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


def _lost(evidence: Evidence) -> tuple[Claim, ...]:
    """Children that were killed on the way: a shell goes on after its command and ends well."""
    claims = []
    for child in evidence.child_deaths:
        if child.status.signal is None or child.status.signal in _AT_SHUTDOWN:
            continue
        oom = examine(evidence, child) if child.status.signal == 9 else None
        by_kernel = oom if oom is not None and oom.answer == "oom" else None
        how = "killed by the kernel's OOM killer" if by_kernel else f"ended by {child.status}"
        reading = Reading(f"pid {child.pid}: {child.status}", child.source, child.wall)
        words = f"{printable(child.name, 50)} (pid {child.pid}) was {how} on the way"
        readings = (*by_kernel.evidence, reading) if by_kernel else (reading,)
        claims.append(Claim(words, by_kernel.grade if by_kernel else "certain", readings))
    return tuple(claims[-2:])
