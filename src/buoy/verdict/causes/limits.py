"""A limit other than memory: the session's time, open files, processes, file size, disk space, shared memory."""

from __future__ import annotations

from buoy.fields import count, mapping, number, text
from buoy.text import printable, typed
from buoy.units import format_bytes, format_duration
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes import signals
from buoy.verdict.causes.common import (
    NO_FILE,
    NO_PAGE,
    FullDisk,
    end_readings,
    full_disk,
    memory_ceiling,
    mount_of,
    raised,
    raised_as,
    recent_signal,
    shm_free,
    status_reading,
)
from buoy.verdict.evidence import Evidence
from buoy.verdict.exceptions import EDQUOT, ENFILE, ExceptionFinding
from buoy.verdict.model import Cause, Claim, Grade, Reading

_NEAR = 0.97
_BEYOND, _BEYOND_SECONDS = 1.01, 5.0
"""Whoever enforces a limit does so when it is reached; what ran on beyond it was not ended by it."""


def judge_time_limit(evidence: Evidence) -> Cause | None:
    """`time-limit`: the session's time was over.

    Likely at best: that the clock was the reason is nowhere written down.
    """
    limit = number(evidence.attempt.get("time_limit"))
    elapsed = _elapsed(evidence)
    if not limit or limit <= 0 or elapsed is None:
        return None
    last = max(_BEYOND * limit, limit + _BEYOND_SECONDS)
    if not _NEAR * limit <= elapsed <= last or not _taken(evidence):
        return None
    source = text(evidence.attempt.get("time_limit_source")) or "attempt.json"
    reading = Reading(
        f"{format_duration(elapsed)} of {format_duration(limit)} had passed ({source})", "attempt.json"
    )
    readings = (reading, *end_readings(evidence))
    return Cause(
        id="time-limit",
        claim=Claim(f"The time limit of {format_duration(limit)} was reached", "likely", readings),
        actor=Claim("the platform or scheduler that sets the limit", "likely"),
        next=(
            how_to_resume(evidence),
            f"save before the limit: after {format_duration(0.95 * limit)} at the latest",
        ),
        survivable=True,
    )  # fmt: skip


def _taken(evidence: Evidence) -> bool:
    if evidence.status.known:
        return evidence.status.signal in (9, 15) or recent_signal(evidence, "SIGTERM") is not None
    speaker = evidence.speaker
    if speaker and speaker.note:
        return False
    return evidence.now.same_machine is False or bool(evidence.death)


def _elapsed(evidence: Evidence) -> float | None:
    """Seconds of the session, which may have begun before the attempt, until the end or the SIGTERM that came first."""
    ran = evidence.ran_for
    asked = recent_signal(evidence, "SIGTERM")
    if ran is not None and asked is not None:  # a scheduler waits half a minute before it kills
        ran = max(0.0, ran - asked.age)
    began = number(evidence.attempt.get("session_started"))
    start = number(evidence.attempt.get("wall"))
    if ran is None or began is None or start is None or not 0 <= start - began < 30 * 86400:
        return ran
    return ran + (start - began)


def judge_open_files(evidence: Evidence) -> Cause | None:
    """`open-files`: too many files were open at once.

    Certain: the system's error 24 (this process) or 23 (the whole machine).
    """
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


_FEWER = "start fewer: lower `num_workers`, `torch.set_num_threads(4)`, `OMP_NUM_THREADS=4`"
# Where the last of them is depends on the version of control groups, and on how deep the process lies in them.
_SHOW = (
    "`ulimit -u`, `cat /proc/sys/kernel/threads-max` and "
    "`find /sys/fs/cgroup -name pids.max -exec grep -H '[0-9]' {} +` show the limits on their number"
)


def judge_process_limit(evidence: Evidence) -> Cause | None:
    """`process-limit`: no further thread or process could be started.

    Certain that it was refused; whether for a limit on their number or for memory is not said.
    """
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


SIGXFSZ = 25


def judge_file_size_limit(evidence: Evidence) -> Cause | None:
    """`file-size-limit`: a file grew beyond RLIMIT_FSIZE, or the limit of the file system.

    Certain from the error EFBIG (27); the signal alone could have been sent by hand.
    """
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


def judge_disk_full(evidence: Evidence) -> Cause | None:
    """`disk-full`: a disk had no room left, or a quota was used up.

    Certain when the system's own error (28 or 122) ended it; likely when SIGBUS struck on a full disk.
    """
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
    full = full_disk(evidence) if signals.is_bus_error(evidence) else None
    if full is None:
        return None
    readings = (*signals.readings(evidence), full.reading)
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


_OF_A_LOADER = (
    "fewer workers, a lower `prefetch_factor` or smaller batches need less; `num_workers=0` needs none",
    "batches that are kept stay there: keep `.clone()` of what you need, not the loader's tensor",
)
_OF_A_FILE = (
    "see what fills it: `ls -lhS /dev/shm`; delete what is old, and write files to a disk instead",
    "DataLoader workers share this room: fewer workers or smaller batches need less",
)
_GUESS_OF_TORCH = "workers are out of shared memory"


def judge_shm_full(evidence: Evidence) -> Cause | None:
    """`shm-full`: the shared memory through which DataLoader workers pass batches is full.

    Certain when torch or the system says so; likely when SIGBUS struck and no room was left.
    """
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
    elif signals.is_bus_error(evidence) and free is not None and free < NO_PAGE:
        readings, cascade = signals.readings(evidence), ()
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
            "is too small for what was requested" if is_small else "had too little space left for the request"
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
