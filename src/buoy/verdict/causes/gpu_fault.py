"""The GPU or its driver reported a fault: an assertion in a kernel, a bad access, a device that is gone."""

from __future__ import annotations

from buoy.machine.kernel_log import parse_xid
from buoy.text import printable
from buoy.verdict.causes.common import gpu_grade, raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading


def judge(evidence: Evidence) -> Cause | None:
    """Certain that CUDA reported it; where in the program is uncertain, since CUDA reports late."""
    found = raised_as(evidence, "gpu-fault")
    if found is None:
        return None
    xids = [line for line in evidence.own_death.lines if parse_xid(str(line["text"]))]
    readings = (
        *found.evidence,
        *(Reading(printable(str(line["text"]), 160), "kernel log") for line in xids[-1:]),
    )
    asserted = "device-side assert" in found.finding.message
    what = "An assertion failed inside a GPU kernel" if asserted else "The GPU reported a fault"
    steps = [
        "the line shown is where it was noticed: run once with `CUDA_LAUNCH_BLOCKING=1` to see where it happened"
    ]
    if asserted:
        steps.insert(
            0,
            "check that every label and index is in range (labels < classes, ids < table size)",
        )
    if xids:
        steps.insert(
            0, "the driver logged a hardware-level error (Xid): take another machine if it comes again"
        )
    steps.append(go_on(evidence))
    return Cause(
        "gpu-fault",
        Claim(what, gpu_grade(evidence, found), readings),
        None,
        found.cascade,
        tuple(steps[:3]),
        survivable=bool(xids),
    )
