"""What several causes need: the status as a reading, a signal that came shortly before, the uncaught exception."""

from __future__ import annotations

from typing import NamedTuple

from buoy.flight import stall
from buoy.flight.attempt import is_kernel
from buoy.units import format_duration
from buoy.verdict.evidence import Evidence, ProcessDeath, ProcessNotes
from buoy.verdict.exceptions import ExceptionFinding, classify
from buoy.verdict.lost_child import LostChild, lost_child
from buoy.verdict.model import Claim, Grade, Reading
from buoy.verdict.room import NO_FILE, full_disk
from buoy.verdict.status import signal_name
from buoy.verdict.values import count, integer, mapping, number, printable, text

_ORDER: tuple[Grade, ...] = ("possible", "likely", "certain")


def weaker(*grades: Grade) -> Grade:
    """The least sure of these."""
    return min(grades, key=_ORDER.index)


def status_reading(evidence: Evidence) -> Reading:
    """How the process ended, as evidence."""
    return Reading(str(evidence.status), evidence.status.source or "death.json", evidence.died_wall)


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
    if speaker is None or note is None or status.signal is not None or status.exit_code == 0:
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


def died_before(evidence: Evidence, death: ProcessDeath, within: float) -> float | None:
    """Seconds between a child's death and the end; None when it came later or too long before."""
    end = evidence.died_t
    if death.t is None or end is None:
        return None
    age = end - death.t
    return max(0.0, age) if -0.5 <= age <= within else None


def how_to_continue(evidence: Evidence) -> str:
    """What wakes a stopped process."""
    return f"`kill -CONT {evidence.pid}` lets it go on; so does `fg` in the shell where Ctrl-Z stopped it"


def was_notebook(evidence: Evidence) -> bool:
    """Whether it was a notebook's kernel: a shell's command is no answer to the person in front of it."""
    return is_kernel(evidence.attempt.get("command"))


def left_in_a_cell(evidence: Evidence) -> bool:
    """Whether a notebook's kernel ended itself with code 0 while a cell ran: `exit()` lets the cell come to its end."""
    main = evidence.main
    return (
        was_notebook(evidence)
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
    note = (evidence.speaker.exception if evidence.speaker else None) or {}
    return "memory_limit" in note, count(note.get("memory_limit"))
