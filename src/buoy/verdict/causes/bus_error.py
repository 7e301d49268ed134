"""SIGBUS: a mapped file has no page behind an address, because it was cut short or its file system is full."""

from __future__ import annotations

from buoy.verdict.causes.common import status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.traces import headline, signal_of, user_frame

SIGBUS = 7


def is_bus_error(evidence: Evidence) -> bool:
    """Whether it died of SIGBUS, by its status or by its own last word."""
    speaker = evidence.speaker
    if speaker and speaker.sent_by(SIGBUS) is not None:
        return False
    if evidence.status.known:
        return evidence.status.signal == SIGBUS
    return bool(speaker and signal_of(headline(speaker.fault.text) or "") == SIGBUS)


def readings(evidence: Evidence) -> tuple[Reading, ...]:
    """The status and the place."""
    found = [status_reading(evidence)] if evidence.status.known else []
    speaker = evidence.speaker
    if speaker and speaker.fault.text:
        place = user_frame(speaker.fault.text)
        words = headline(speaker.fault.text) or "Bus error"
        source = f"process-{speaker.pid}/fault.txt"
        found.append(Reading(f"{words}{f', at {place}' if place else ''}", source, speaker.fault.wall))
    return tuple(found)


def judge(evidence: Evidence) -> Cause | None:
    """Likely: full file systems are told by their own files; what is left is a mapped file that changed."""
    if not is_bus_error(evidence):
        return None
    return Cause(
        id="bus-error",
        claim=Claim("It touched a mapped file that has no data there (SIGBUS)", "likely", readings(evidence)),
        actor=Claim("a file that was shortened while mapped, failing storage, or a SIGBUS sent with `kill`",
                    "possible"),
        next=("let nothing rewrite data files in place while they are memory-mapped (write beside, then rename)",
              "if the file lies on a mounted drive, copy it to the local disk first", go_on(evidence)),
        survivable=True,
    )  # fmt: skip
