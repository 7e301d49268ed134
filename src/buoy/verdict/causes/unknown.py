"""It cannot be told, and this says what was missing."""

from __future__ import annotations

import os

from buoy.machine.records import read_json
from buoy.verdict.causes.common import status_reading, was_notebook
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import examine
from buoy.verdict.values import mapping, text


def judge_damaged(evidence: Evidence) -> Cause | None:
    """A death whose record can no longer be read: likely what was judged while it was whole."""
    if not evidence.is_death_damaged or not evidence.is_dead:
        return None
    damage = Reading("the death record is damaged", "death.json")
    cause = mapping((read_json(os.path.join(evidence.folder, "verdict.json")) or {}).get("cause"))
    kind, words = text(cause.get("id")), text(mapping(cause.get("claim")).get("text"))
    if kind is None or words is None:
        readings = (damage, status_reading(evidence)) if evidence.status.known else (damage,)
        claim = Claim("I cannot tell: it ended, and the death record is damaged", "possible", readings)
        return Cause("unknown", claim, next=(go_on(evidence),), survivable=True)
    then = Reading("so it was judged while the record was whole", "verdict.json")
    return Cause(kind, Claim(words, "likely", (damage, then)), next=(go_on(evidence),))


def judge(evidence: Evidence) -> Cause:
    """Always an answer, never more than possible."""
    if not evidence.attempt and not evidence.death and not evidence.exit:
        claim = Claim("I cannot tell: this folder holds no record of an attempt", "possible")
        return Cause("unknown", claim, next=("check the path: `buoy why RUN` wants a run folder",))
    if evidence.never_started and evidence.now.same_machine is not False:
        words = "I cannot tell: it never started, or was cut off before anything was recorded"
        return Cause("unknown", Claim(words, "possible"), next=(
            "start it again, recorded as before", "`buoy why RUN --attempt N` shows an earlier attempt",
        ))  # fmt: skip
    if not evidence.death and not evidence.exit:
        words = "I cannot tell: the record was made on another machine and may still be growing there"
        return Cause("unknown", Claim(words, "possible"), next=("ask on the machine where it runs",))
    readings = [status_reading(evidence)] if evidence.status.known else []
    oom = examine(evidence, evidence.own_death) if evidence.death else None
    if evidence.status.signal == 9:
        words = f"I cannot tell who sent SIGKILL: {oom.reason if oom else 'nobody read the counters at the death'}"
    else:
        words = "I cannot tell: its exit status could not be read, and it left no last words"
        if oom and oom.answer == "not-oom":
            words += "; the kernel's OOM killer it was not"
    readings += list(oom.evidence) if oom else []
    return Cause(
        "unknown", Claim(words, "possible", tuple(readings)), None, (), _next(evidence), survivable=True
    )


def _next(evidence: Evidence) -> tuple[str, ...]:
    if evidence.status.known or was_notebook(evidence):
        return (go_on(evidence),)
    return (
        "start it with `buoy run -- COMMAND`: the parent process always learns the exact status",
        go_on(evidence),
    )
