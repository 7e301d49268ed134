"""What several causes need: the status as a reading, a recent signal, the exception, a child that died, a full disk."""

from __future__ import annotations

import os
from typing import NamedTuple

from buoy.fields import count, integer, mapping, number, text
from buoy.flight.alarms import stall
from buoy.text import printable
from buoy.units import format_bytes, format_duration
from buoy.verdict.evidence import Evidence, ProcessDeath, ProcessNotes
from buoy.verdict.exceptions import ExceptionFinding, LostChild, classify, lost_child
from buoy.verdict.model import Claim, Grade, Reading
from buoy.verdict.oom import SIGKILL, OomFinding, examine
from buoy.verdict.status import signal_name

_ORDER: tuple[Grade, ...] = ("possible", "likely", "certain")
AT_SHUTDOWN = (1, 2, 13, 15)
"""Signals that end a child in order: its parent asked for it, or its reader had enough."""
_RELAYS = ("timeout", "sudo", "su", "runuser", "unshare", "script")
_NO_RELAYS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "busybox", "make", "xargs", "setsid")
_NOTICED_WITHIN = 0.5
"""Seconds between a death and its record, where the record does not say."""


def weaker(*grades: Grade) -> Grade:
    """The least sure of these."""
    return min(grades, key=_ORDER.index)


def status_reading(evidence: Evidence) -> Reading:
    """How the process ended, as evidence."""
    return Reading(str(evidence.status), evidence.status.source or "death.json", evidence.died_wall)


def end_readings(evidence: Evidence) -> tuple[Reading, ...]:
    """The same; nothing where nobody could read it."""
    return (status_reading(evidence),) if evidence.status.known else ()


class SignalSeen(NamedTuple):
    """A signal that reached the training, or the launcher above it, before the end."""

    age: float
    reading: Reading
    sender: str | None


def recent_signal(evidence: Evidence, name: str, within: float = 60.0) -> SignalSeen | None:
    """Whether this signal came within so many seconds of the end. One from minutes ago was survived."""
    forwarded = _forwarded(evidence, name)
    if forwarded is not None and forwarded.age <= within:
        return forwarded
    speaker = evidence.speaker
    dump = speaker.dump(name) if speaker else None
    if speaker is None or dump is None or not dump.text:
        return None
    age = evidence.seconds_before_death(dump.wall)
    if age is None or age > within:
        return None
    source = f"process-{speaker.pid}/{name}.txt"
    when = "at the end" if age < 0.5 else f"{format_duration(age)} before the end"
    return SignalSeen(age, Reading(f"{name} came {when}", source, dump.wall), None)


def _forwarded(evidence: Evidence, name: str) -> SignalSeen | None:
    end = evidence.last_t
    for event in reversed(evidence.events_of("signal")):
        value = event.get("signal")
        received = text(value) or (signal_name(value) if isinstance(value, int) and value > 0 else None)
        t = number(event.get("t"))
        if received != name or t is None or end is None:
            continue
        pid = count(event.get("from_pid"))
        sender = (
            f"pid {pid}, through `buoy run`" if pid else "whoever signalled `buoy run`, which passed it on"
        )
        age = max(0.0, end - t)
        words = f"`buoy run` received {name} {format_duration(age)} before the end and passed it on"
        return SignalSeen(age, Reading(words, "events.jsonl", number(event.get("wall"))), sender)
    return None


def signal_sender(evidence: Evidence, name: str) -> Claim | None:
    """Who sent a signal, if `buoy run` was the one that passed it on."""
    seen = _forwarded(evidence, name)
    return Claim(f"sent by {seen.sender}", "certain", (seen.reading,)) if seen and seen.sender else None


class Raised(NamedTuple):
    """The exception that ended the process."""

    finding: ExceptionFinding
    grade: Grade
    evidence: tuple[Reading, ...]
    cascade: tuple[Claim, ...]
    lost: LostChild | None = None
    """The child process whose end it reports, if it does."""


def raised(evidence: Evidence) -> Raised | None:
    """The uncaught exception, if it is what ended the process: a signal or exit code 0 after it says that it is not."""
    speaker = evidence.speaker
    note = speaker.exception if speaker else None
    status = evidence.status
    if speaker is None or note is None or status.exit_code == 0:
        return None
    if status.signal is not None and not evidence.crashed_at_exit:
        return None
    finding = classify(note, full_disk(evidence, NO_FILE) is not None)
    launcher = lost_child(evidence.main.exception or {}) if evidence.main else None
    named = launcher.pids if launcher else ()
    followed = speaker.pid in (evidence.pid, *named, *(death.pid for death in evidence.child_deaths))
    grade: Grade = (
        "certain"
        if followed
        and status.exit_code == 1
        and note.get("thread") in (None, "MainThread")
        and note.get("uncaught") is not False
        else "likely"
    )
    readings = [Reading(finding.short, speaker.source)]
    readings.append(
        status_reading(evidence) if status.known else Reading("no exit status was read", "death.json")
    )
    cascade = passed_on(evidence, speaker)
    return Raised(finding, weaker(grade, finding.grade), tuple(readings), cascade, lost_child(note))


def raised_as(evidence: Evidence, *kinds: str) -> Raised | None:
    """The uncaught exception, if it is of one of these kinds."""
    found = raised(evidence)
    return found if found is not None and found.finding.id in kinds else None


def passed_on(evidence: Evidence, speaker: ProcessNotes) -> tuple[Claim, ...]:
    """That a child's end became the end of the process we watch, if so."""
    # Who the training was, a torn record does not say.
    if evidence.pid is None or speaker.pid == evidence.pid:
        return ()
    who = printable(evidence.command, 60)
    return (Claim(f"process {speaker.pid} ended first; `{who}` passed its end on", "likely"),)


def age_of(evidence: Evidence, death: ProcessDeath) -> float | None:
    """Seconds from a child's death to the end, which is the exception where one ended it; None when it came later."""
    end = evidence.end_t
    if death.t is None or end is None:
        return None
    since = death.since if death.since is not None else death.t - _NOTICED_WITHIN
    return max(0.0, end - death.t) if since <= end else None


def end_of(evidence: Evidence) -> str:
    """What the times of a story are counted from: the exception, or the end of the process."""
    return "the exception" if evidence.end_t != evidence.died_t else "the end"


def before(age: float, end: str) -> str:
    """`12 s before the end`."""
    return f"just before {end}" if age < 0.5 else f"{format_duration(round(age, 1))} before {end}"


def is_relay(evidence: Evidence) -> bool | None:
    """Whether it is a program that ends itself by the signal that ended its command; None of one nobody knows."""
    program = os.path.basename(evidence.command.split(" ", 1)[0])
    if evidence.main is not None or program in _NO_RELAYS:
        return False
    return True if program in _RELAYS else None


def died_before(evidence: Evidence, death: ProcessDeath, within: float) -> float | None:
    """The same; None also when it was too long before."""
    age = age_of(evidence, death)
    return age if age is not None and age <= within else None


class ViolentDeath(NamedTuple):
    """The end of a child process that neither it nor its parent had in mind."""

    evidence: Evidence
    death: ProcessDeath

    @property
    def age(self) -> float | None:
        """Seconds before the end; None when it came later."""
        return age_of(self.evidence, self.death)

    @property
    def oom(self) -> OomFinding | None:
        """The kernel's part in it, if the signal fits."""
        return examine(self.evidence, self.death) if self.death.status.signal in (None, SIGKILL) else None

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel killed it for lack of memory."""
        return (oom := self.oom) is not None and oom.answer == "oom"

    @property
    def who(self) -> str:
        """Its name and pid."""
        return f"{printable(self.death.name, 50)} (pid {self.death.pid})"

    def claim(self, others: int = 0) -> Claim:
        """A line of the story; `others`: so many more before it, not listed one by one."""
        when = f" {before(self.age, end_of(self.evidence))}" if self.age is not None else ""
        more = f"; {others} more child processes had died of signals before" if others else ""
        reading = Reading(f"pid {self.death.pid}: {self.death.status}", self.death.source, self.death.wall)
        oom = self.oom
        if oom is not None and oom.answer == "oom":
            words = f"{self.who} was killed by the kernel's OOM killer{when}{more}"
            return Claim(words, oom.grade, (*oom.evidence, reading))
        return Claim(f"{self.who} was ended by {self.death.status}{when}{more}", "certain", (reading,))


def violent_deaths(evidence: Evidence) -> list[ViolentDeath]:
    """The ends of child processes by a signal that no orderly end sends, or by the kernel; in order of time."""
    found, counted = [], None
    for death in evidence.child_deaths:
        kills = [mapping(death.counters.get(which)).get("after") for which in ("cgroup", "host")]
        signal, may_be_oom = death.status.signal, kills != counted or death.lines
        counted = kills
        if death.is_ours or signal in AT_SHUTDOWN or death.status.exit_code is not None:
            continue
        child = ViolentDeath(evidence, death)
        # Of an end that nobody could read only the kernel's part can be known, and most had none.
        if signal is not None or (may_be_oom and child.by_kernel):
            found.append(child)
    return found


def advice_about(violent: list[ViolentDeath]) -> tuple[str, ...]:
    """A child that died violently may be why the rest failed."""
    earlier = [child for child in violent if child.age is not None]
    if not earlier:
        return ()
    return (f"first find out why {earlier[-1].who} died: the rest may only follow from that",)


def how_to_continue(evidence: Evidence) -> str:
    """What wakes a stopped process."""
    return f"`kill -CONT {evidence.pid}` resumes it; so does `fg` in the shell where Ctrl-Z stopped it"


def left_in_a_cell(evidence: Evidence) -> bool:
    """Whether a notebook's kernel ended itself with code 0 while a cell ran: `exit()` lets the cell come to its end."""
    main = evidence.main
    return (
        evidence.is_kernel
        and evidence.status.exit_code == 0
        and main is not None
        and not main.left_in_order
        and main.phase not in (None, "done")
        and bool(main.cell)
    )


def saw_gpu(evidence: Evidence) -> bool:
    """Whether a GPU was there: without one, words about a GPU's memory are only words."""
    return bool(evidence.death.get("gpu")) or any(row.get("gpu_used") for row in evidence.samples[-10:])


def gpu_grade(evidence: Evidence, found: Raised) -> Grade:
    """How sure an exception about the GPU is: a framework's own type, or a GPU that was seen, else only words."""
    own = not found.finding.type.startswith("builtins.")
    return found.grade if own or saw_gpu(evidence) else weaker(found.grade, "likely")


def shm_free(evidence: Evidence) -> int | None:
    """The least room seen in /dev/shm lately: the dead process has given its own back by now."""
    seen = [count(mapping(mapping(evidence.death.get("disks")).get("shm")).get("free"))]
    seen += [count(row.get("shm_free")) for row in evidence.samples[-10:]]
    return min((value for value in seen if value is not None), default=None)


def standing_hang(evidence: Evidence) -> dict[str, object] | None:
    """The hang that had not ended when the record does."""
    return stall.standing(evidence.events)


def step_of(event: dict[str, object]) -> str:
    """`step 120`, or `its start` before the first."""
    step = integer(event.get("step"))
    return f"step {step}" if step else "its start"


def memory_ceiling(evidence: Evidence) -> tuple[bool, int | None]:
    """Whether the limits on this process's own memory were read, and the least of them if there is one."""
    return "memory_limit" in evidence.exception, count(evidence.exception.get("memory_limit"))


# Which disk was full, by what was read before the end and not after: what fills a disk is often gone with the process,
# and the recorder's own reserve is given back at the death.

NO_PAGE = 1 << 20
"""A file system with less than this free takes no further page of a mapped file."""
NO_FILE = 16 << 20
"""Less than this is no room for a file whose write has just failed."""
_LATELY = 10.0
"""Seconds before the end in which a reading is about the end."""


class FullDisk(NamedTuple):
    """A folder on the disk that is full, and what shows that."""

    path: str
    reading: Reading


def full_disk(evidence: Evidence, below: int = NO_PAGE) -> FullDisk | None:
    """A disk of this attempt that had less than this many bytes free at the end, if any; never /dev/shm."""
    return (
        _by_its_last_words(evidence, below)
        or _by_samples(evidence, below)
        or _by_warning(evidence)
        or _by_death_record(evidence, below)
    )


def _by_its_last_words(evidence: Evidence, below: int) -> FullDisk | None:
    speaker = evidence.speaker
    free = count(evidence.exception.get("run_disk_free"))
    if speaker is None or free is None or free >= below:
        return None
    folder = evidence.run_folder
    return FullDisk(folder, Reading(f"{format_bytes(free)} free where {folder} lies", speaker.source))


def _by_samples(evidence: Evidence, below: int) -> FullDisk | None:
    end = evidence.last_t
    for row in reversed(evidence.samples[-100:]):
        free, t = count(row.get("disk_free")), number(row.get("t"))
        if free is None or t is None or end is None or end - t > _LATELY:
            continue
        if free >= below:
            return None  # it is the newest reading that counts
        moved = next((text(event.get("path")) for event in reversed(evidence.events_of("disk"))), None)
        path = moved or evidence.run_folder
        reading = Reading(f"{format_bytes(free)} free where {path} lies", "samples", number(row.get("wall")))
        return FullDisk(path, reading)
    return None


def _by_warning(evidence: Evidence) -> FullDisk | None:
    """The recorder's own warning: a full disk may have taken no sample any more."""
    end = evidence.last_t
    for event in reversed(evidence.events_of("warning")):
        t, path = number(event.get("t")), text(mapping(event.get("values")).get("path"))
        if event.get("alarm") == "disk-full" and path and t is not None and end is not None:
            reading = Reading(f"the disk of {path} was full", "events.jsonl", number(event.get("wall")))
            return FullDisk(path, reading) if end - t <= _LATELY else None
    return None


def _by_death_record(evidence: Evidence, below: int) -> FullDisk | None:
    for disk in mapping(evidence.death.get("disks")).values():
        free, path = count(mapping(disk).get("free")), text(mapping(disk).get("path"))
        if free is not None and path and free < below and not path.startswith("/dev/shm"):  # noqa: S108
            return FullDisk(path, Reading(f"no room left on {path}", "death.json", evidence.died_wall))
    return None


def mount_of(folder: str) -> str:
    """The folder in which this one's disk begins; the same folder where that cannot be seen, or is the whole system."""
    try:
        device, found = os.stat(folder).st_dev, os.path.realpath(folder)
        while os.stat(os.path.dirname(found)).st_dev == device:
            if found == "/":
                return folder
            found = os.path.dirname(found)
    except OSError:
        return folder
    return found
