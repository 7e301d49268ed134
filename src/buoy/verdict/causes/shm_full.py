"""The shared memory through which DataLoader workers hand over batches is full."""

from __future__ import annotations

from buoy.units import format_bytes
from buoy.verdict.causes import bus_error
from buoy.verdict.causes.common import raised, shm_free
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.room import NO_PAGE
from buoy.verdict.values import count, mapping

_OF_A_LOADER = (
    "fewer workers, a lower `prefetch_factor` or smaller batches need less; `num_workers=0` needs none",
    "batches that are kept stay there: keep `.clone()` of what you need, not the loader's tensor",
)
_OF_A_FILE = (
    "see what fills it: `ls -lhS /dev/shm`; delete what is old, and write files to a disk instead",
    "DataLoader workers share this room: fewer workers or smaller batches need less",
)
_GUESS_OF_TORCH = "workers are out of shared memory"


def judge(evidence: Evidence) -> Cause | None:
    """Certain when torch or the system says so; likely when SIGBUS struck and no room was left."""
    found = raised(evidence)
    free = shm_free(evidence)
    grade: Grade = "likely"
    if found and found.finding.id == "shm-full":
        grade, readings, cascade = found.grade, found.evidence, found.cascade
        seen = [room for room in (free, found.finding.shm_free) if room is not None]
        free = min(seen, default=None)
    elif found and _GUESS_OF_TORCH in found.finding.message:  # torch says this of any SIGBUS in a worker
        grade = "likely" if free is not None and free < 64 * NO_PAGE else "possible"
        readings, cascade = found.evidence, found.cascade
    elif bus_error.is_bus_error(evidence) and free is not None and free < NO_PAGE:
        readings, cascade = bus_error.readings(evidence), ()
    else:
        return None
    total = count(mapping(mapping(evidence.death.get("disks")).get("shm")).get("total"))
    if free is not None:
        room = f"{format_bytes(free)} free in /dev/shm of {format_bytes(total)}"
        readings = (*readings, Reading(room, "samples", evidence.last_wall))
    size = f" ({format_bytes(total)})" if total else ""
    state = "is full"
    if free is not None and free >= NO_PAGE:  # "full" beside this much room would be a contradiction
        is_small = total is not None and free > total / 2
        state = (
            "is too small for what was asked" if is_small else "had too little room left for what was asked"
        )
    return Cause(
        id="shm-full",
        claim=Claim(f"The shared memory in /dev/shm{size} {state}", grade, readings),
        cascade=cascade,
        next=(
            *(_OF_A_FILE if found and found.finding.errno is not None else _OF_A_LOADER),
            "in Docker: `--shm-size=8g` (or `--ipc=host`); as root: `mount -o remount,size=8G /dev/shm`",
        ),
    )  # fmt: skip
