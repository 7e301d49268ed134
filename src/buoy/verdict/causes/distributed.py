"""Another rank of a distributed training died or fell silent, and this one noticed."""

from __future__ import annotations

from buoy.verdict.causes.common import raised_as, weaker
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim


def judge(evidence: Evidence) -> Cause | None:
    """Likely: the words of the library speak of a peer, whose own end is recorded elsewhere if at all."""
    found = raised_as(evidence, "distributed")
    if found is None:
        return None
    message = found.finding.message.lower()
    silent = "timeout" in message or "timed out" in message
    what = "Another rank did not answer in time" if silent else "The connection to another rank broke"
    return Cause(
        id="distributed",
        claim=Claim(what, weaker(found.grade, "likely"), found.evidence),
        actor=Claim("a rank that died or hangs; this process is not the one to blame", "likely"),
        cascade=found.cascade,
        next=("look at the other ranks' logs: `buoy why` on the run of the rank that ended first",
              "`TORCH_DISTRIBUTED_DEBUG=DETAIL` names the collective that did not match", go_on(evidence)),
        survivable=True,
    )  # fmt: skip
