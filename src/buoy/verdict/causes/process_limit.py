"""No further thread or process could be started."""

from __future__ import annotations

from buoy.units import format_bytes
from buoy.verdict.causes.common import memory_ceiling, raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim

_FEWER = "start fewer: lower `num_workers`, `torch.set_num_threads(4)`, `OMP_NUM_THREADS=4`"
# Where the last of them is depends on the version of control groups, and on how deep the process lies in them.
_SHOW = (
    "`ulimit -u`, `cat /proc/sys/kernel/threads-max` and "
    "`find /sys/fs/cgroup -name pids.max -exec grep -H '[0-9]' {} +` show the limits on their number"
)


def judge(evidence: Evidence) -> Cause | None:
    """Certain that it was refused; whether for a limit on their number or for memory is not said."""
    found = raised_as(evidence, "process-limit")
    if found is None:
        return None
    what = "thread" if "thread" in found.finding.message else "process"
    was_read, ceiling = memory_ceiling(evidence)
    actor = Claim("a limit on processes and threads (user, container), or no memory for one more", "likely")
    steps: tuple[str, ...] = (_SHOW, _FEWER)
    if ceiling is not None:
        actor = Claim(
            f"a limit on the memory of a process was set, {format_bytes(ceiling)} (`ulimit -v`, `ulimit -d`, or "
            f"`setrlimit` in the script), and every {what} takes some of it; or a limit on their number",
            "likely",
        )
        steps = (
            "`ulimit -v` shows the limit on address space, `ulimit -v unlimited` lifts it; the script may set it too",
            _FEWER,
            _SHOW,
        )
    elif was_read:
        actor = Claim(
            "a limit on processes and threads (user, container), or no memory for one more; no limit on address space "
            "was set",
            "likely",
        )
    return Cause(
        id="process-limit",
        claim=Claim(f"The system refused to start another {what}", found.grade, found.evidence),
        actor=actor,
        cascade=found.cascade,
        next=steps,
    )
