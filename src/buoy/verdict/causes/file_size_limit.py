"""A file grew beyond what one file may hold (RLIMIT_FSIZE, or the file system's own limit)."""

from __future__ import annotations

from buoy.text import printable
from buoy.verdict.causes.common import raised_as, status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Grade, Reading

SIGXFSZ = 25


def judge(evidence: Evidence) -> Cause | None:
    """Certain from the error EFBIG (27); the signal alone could have been sent by hand."""
    found = raised_as(evidence, "file-size-limit")
    grade: Grade
    readings: tuple[Reading, ...]
    if found is not None:
        grade, readings, path = found.grade, found.evidence, found.finding.path
    elif evidence.status.signal == SIGXFSZ:
        grade, readings, path = "likely", (status_reading(evidence),), None
    else:
        return None
    what = f" ({printable(path, 80)})" if path else ""
    return Cause(
        id="file-size-limit",
        claim=Claim(f"A file{what} reached the largest size allowed", grade, readings),
        cascade=found.cascade if found else (),
        next=("`ulimit -f` shows the limit (in blocks of 1 KiB in bash); `ulimit -f unlimited` lifts it",
              "save in several smaller files (shards)"),
    )  # fmt: skip
