"""No further thread or process could be started."""

from __future__ import annotations

from buoy.verdict.causes.common import raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim


def judge(evidence: Evidence) -> Cause | None:
    """Certain that it was refused; whether for a limit on their number or for memory is not said."""
    found = raised_as(evidence, "process-limit")
    if found is None:
        return None
    what = "thread" if "thread" in found.finding.message else "process"
    return Cause(
        id="process-limit",
        claim=Claim(f"The system refused to start another {what}", found.grade, found.evidence),
        actor=Claim("a limit on processes and threads (user, container), or no memory for one more", "likely"),
        cascade=found.cascade,
        next=("`ulimit -u` and `cat /sys/fs/cgroup/pids.max` show the limits",
              "start fewer: lower `num_workers`, `torch.set_num_threads(4)`, `OMP_NUM_THREADS=4`"),
    )  # fmt: skip
