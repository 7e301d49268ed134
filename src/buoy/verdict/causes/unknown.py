"""It cannot be told, and this says what was missing."""

from __future__ import annotations

from buoy.verdict.causes.common import go_on, status_reading, was_notebook
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim
from buoy.verdict.oom import examine


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
