"""Too many files were open at once."""

from __future__ import annotations

from buoy.verdict.causes.common import raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.exceptions import ENFILE
from buoy.verdict.model import Cause, Claim


def judge(evidence: Evidence) -> Cause | None:
    """Certain: the system's error 24 (this process) or 23 (the whole machine)."""
    found = raised_as(evidence, "open-files")
    if found is None:
        return None
    whole = found.finding.errno == ENFILE
    what = "The whole machine has too many files open" if whole else "It had too many files open"
    return Cause("open-files", Claim(what, found.grade, found.evidence), None, found.cascade, (
        "`ulimit -n` shows the limit; `ulimit -n 65536` before the start raises it",
        "close what is opened per sample (`with open(...)`); DataLoader workers: "
        "`torch.multiprocessing.set_sharing_strategy('file_system')`",
    ))  # fmt: skip
