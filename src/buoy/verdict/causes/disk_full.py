"""No room was left on a disk, or a quota was used up."""

from __future__ import annotations

from buoy.text import printable, typed
from buoy.units import format_bytes
from buoy.verdict.causes import bus_error
from buoy.verdict.causes.common import raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.exceptions import EDQUOT, ExceptionFinding
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.room import NO_FILE, FullDisk, full_disk, mount_of
from buoy.verdict.values import count, mapping, text


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the system's own error (28 or 122) ended it; likely when SIGBUS struck on a full disk."""
    found = raised_as(evidence, "disk-full")
    if found is None:
        return _by_bus_error(evidence)
    finding = found.finding
    quota = finding.errno == EDQUOT or "quota" in finding.message.lower()
    what = "The disk quota was used up" if quota else "No space was left on the disk"
    path = printable(finding.path, 80) if finding.path else None
    known = None if path or quota else _other_disk(evidence, finding)
    if known is not None:
        place = mount_of(known.path)
        words = f"{what} that holds {printable(place, 80)}"
        claim = Claim(words, found.grade, (known.reading, *found.evidence))
        return Cause("disk-full", claim, cascade=found.cascade, next=_next(evidence, place))
    room = f"{format_bytes(finding.free)} free where {path or 'the working directory'} lies"
    readings = (
        *found.evidence,
        Reading(room, f"process-{evidence.speaker.pid}/beacon" if evidence.speaker else ""),
    )
    folder = path.rpartition("/")[0] or "/" if path and "/" in path else None
    return Cause(
        id="disk-full",
        claim=Claim(f"{what}{f' while writing {path}' if path else ''}", found.grade, readings),
        cascade=found.cascade,
        next=_next(evidence, folder, finding.free),
    )


def _other_disk(evidence: Evidence, finding: ExceptionFinding) -> FullDisk | None:
    """The full disk, where no file was named and the working directory is on another one."""
    is_here = finding.free is not None and finding.free < NO_FILE
    return None if is_here else full_disk(evidence, NO_FILE)


def _by_bus_error(evidence: Evidence) -> Cause | None:
    full = full_disk(evidence) if bus_error.is_bus_error(evidence) else None
    if full is None:
        return None
    readings = (*bus_error.readings(evidence), full.reading)
    claim = Claim(f"A mapped file could not grow: no space was left on {full.path}", "likely", readings)
    return Cause("disk-full", claim, next=_next(evidence, mount_of(full.path)))


def _next(evidence: Evidence, full: str | None, room: int | None = None) -> tuple[str, ...]:
    folder = full or text(evidence.attempt.get("cwd")) or "."
    place = typed(folder)
    steps = [f"see what fills it: `du -xh {place} | sort -h | tail`; `df -h {place}` shows what is left"]
    if room is not None and room > 1 << 30:
        steps.append("if there is room: `df -i` shows inodes, `sysctl fs.inotify` the limit on watched files")
    steps.append("keep only the last few checkpoints, and delete the old one only after the new one is whole")
    free = count(mapping(mapping(evidence.death.get("disks")).get("tmp")).get("free"))
    if "drive" in folder.lower():
        steps.append("empty the drive's bin too: deleted checkpoints still count there")
    elif free is not None and free > 4 << 30:
        steps.append(f"the temporary folder has {format_bytes(free)} free: caches can go there")
    return tuple(steps[:3])
