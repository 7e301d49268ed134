"""Everything an attempt left behind, read once, and what can be seen of its machine and its process now.

Any file may be missing, torn or foreign: then it says nothing.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal, NamedTuple

from buoy.fields import count, integer, mapping, number, text
from buoy.flight.attempt import is_kernel
from buoy.flight.beacon import FatalSignal, read_beacon
from buoy.flight.log import read_events, read_samples
from buoy.machine import host, procfs
from buoy.machine.files import read_end, read_json
from buoy.machine.process import ROLE
from buoy.text import whole_number
from buoy.units import format_duration
from buoy.verdict.exceptions import lost_child
from buoy.verdict.stacks import headline, signal_of
from buoy.verdict.status import Status, make_status

Mode = Literal["no-kernel-log", "old-kernel", "notes-only"]
"""Evidence taken away: the kernel log unreadable; no PIDFD_INFO_EXIT; the sidecar killed too."""

SIGNAL_FILES = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU")
_TEXT_MOST = 256 << 10
_SLACK = 5.0
"""Seconds by which the age of a process and of its attempt may differ."""
_SAMPLES_SLACK = 0.05
"""Seconds: more than the rounding of times."""
_MANY_PROCESSES = 16
"""Of more than these less is read of each."""
_SAMPLES_TAIL = 48 << 10
"""Some hundred samples: ten minutes at full rate would cost a tenth of a second."""

_CRASHES = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV."""


class Dump(NamedTuple):
    """A stack text, and when it was written (wall clock)."""

    text: str = ""
    wall: float | None = None


class ProcessNotes(NamedTuple):
    """What one instrumented process said."""

    pid: int
    step: int | None = None
    step_t: float | None = None
    epoch: int | None = None
    phase: str | None = None
    cell: str | None = None
    note: dict[str, Any] | None = None
    fault: Dump = Dump()
    stacks: Dump = Dump()
    signals: tuple[tuple[str, Dump], ...] = ()
    cells: str = ""
    """Lines `NUMBER FILE`: the cells by the files that stacks name."""
    fatal: FatalSignal | None = None
    """What the kernel said to it of a signal that ends a process."""

    @property
    def source(self) -> str:
        """Where its notes are."""
        return f"process-{self.pid}/beacon"

    @property
    def exception(self) -> dict[str, Any] | None:
        """The exception nobody caught, if it left one."""
        return self.note if self.note and self.note.get("kind") == "exception" else None

    @property
    def left_in_order(self) -> bool:
        """Whether the interpreter began to shut down in order."""
        return bool(self.note and (self.note.get("kind") == "exit" or self.note.get("exited") is True))

    @property
    def is_messenger(self) -> bool:
        """Whether its exception only reports that a process it had started failed."""
        kind = str((self.exception or {}).get("type"))
        return kind.endswith((".CalledProcessError", ".ChildFailedError"))

    def raised_by_kernel(self, signal: int | None) -> FatalSignal | None:
        """This signal, if the kernel itself raised it because of what the code did: nobody can send such a one."""
        return self.fatal if self.fatal and self.fatal.number == signal and self.fatal.code > 0 else None

    def sent_by(self, signal: int | None) -> int | None:
        """The pid of another process that sent this signal; 0: one outside of its container."""
        fatal = self.fatal
        if fatal is None or fatal.number != signal or fatal.code > 0 or fatal.pid == self.pid:
            return None  # a library that handled a crash sends itself the signal once more
        return int(fatal.pid)

    def dump(self, name: str) -> Dump:
        """The stacks written when this signal came; empty when it never came."""
        return dict(self.signals).get(name, Dump())


class ProcessDeath(NamedTuple):
    """A death as the recorder saw it, of the training process or of one it started."""

    pid: int | None
    name: str
    status: Status
    t: float | None
    wall: float | None
    counters: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    rss: int | None
    source: str
    since: float | None = None
    """When it was last seen alive: `t` is when its death was noticed, which a busy machine puts off."""
    is_ours: bool = False
    """Whether it was a process of buoy's own, such as one that traced a plan."""


class ParentDeath(NamedTuple):
    """The end of the process that had started the training."""

    death: ProcessDeath
    is_awaited: bool
    """Whether Jupyter had told the training, a kernel, to end with it."""
    is_together: bool
    """Whether both ends were seen in one look: then their order is not known."""


class Now(NamedTuple):
    """The present, compared with what attempt.json says. None: cannot be compared."""

    wall: float
    same_boot: bool | None
    same_host: bool | None
    same_container: bool | None
    """Whether PID 1 is still the one that was there: a restarted container has another on the same boot."""
    alive: bool
    sees_inside: bool
    """Whether it ran in a container that we look into from outside: then we would see it."""
    stopped: bool = False
    """Whether it lives but is stopped (state T): by Ctrl-Z, SIGSTOP or a debugger."""

    @property
    def same_machine(self) -> bool | None:
        """False if anything shows that this is another machine or another life of it; None if nothing can be said."""
        answers = (self.same_boot, self.same_host, self.same_container)
        if False in answers:
            return False
        return True if self.same_boot else None


class Evidence(NamedTuple):
    """The files of an attempt as values, and what can be seen of its process now."""

    folder: str
    attempt: dict[str, Any]
    exit: dict[str, Any]
    death: dict[str, Any]
    events: tuple[dict[str, Any], ...]
    processes: dict[int, ProcessNotes]
    samples: tuple[dict[str, Any], ...]
    now: Now
    is_death_damaged: bool = False
    """Whether there is a record of the death that cannot be read."""
    lost_samples: str | None = None
    """That samples of its end were taken and are not here, as a sentence: what is left says nothing of the end."""

    def without(self, mode: Mode) -> Evidence:
        """The same death as a poorer machine would have recorded it."""
        if mode == "no-kernel-log":
            silent = {"readable": False, "reason": "taken away", "lines": []}
            events = tuple({**event, "kernel_log": []} for event in self.events)
            return self._replace(
                events=events, death={**self.death, "kernel_log": silent} if self.death else {}
            )
        if mode == "old-kernel":
            death = dict(self.death)
            if mapping(death.get("status")).get("source") == "pidfd":
                death["status"] = {"raw": None, "source": None}
            events = tuple(
                {**event, "status": None} if event.get("source") == "pidfd" else event
                for event in self.events
            )
            return self._replace(events=events, death=death)
        start = tuple(event for event in self.events if event.get("kind") == "start")
        return self._replace(exit={}, death={}, events=start)

    @property
    def pid(self) -> int | None:
        """The training process."""
        return count(self.attempt.get("pid")) or count(self.death.get("pid")) or count(self.exit.get("pid"))

    @property
    def run_folder(self) -> str:
        """The run that the recording belongs to."""
        return os.path.dirname(os.path.dirname(self.folder))

    @property
    def is_kernel(self) -> bool:
        """Whether it was a notebook's kernel: a shell's command is no answer to the user in front of it."""
        return is_kernel(self.attempt.get("command"))

    @property
    def command(self) -> str:
        """The command as it was started."""
        words = self.attempt.get("command")
        return " ".join(map(str, words)) if isinstance(words, list) and words else "the training process"

    @property
    def status(self) -> Status:
        """How the training process ended: its parent's word before the sidecar's."""
        of_parent = make_status(integer(self.exit.get("status")), "exit.json")
        if of_parent.known:
            return of_parent
        recorded = mapping(self.death.get("status"))
        return make_status(integer(recorded.get("raw")), "death.json")

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, as far as anyone can see."""
        return bool(self.death or self.exit) or not self.now.alive

    @property
    def never_started(self) -> bool:
        """Whether nothing shows that anything ran: no reading, no word of a process, no end."""
        return not (self.death or self.exit or self.events or self.samples or self.processes)

    @property
    def died_t(self) -> float | None:
        """When it died, on the monotonic clock of that boot."""
        return _first(number(self.death.get("t")), number(self.exit.get("t")))

    @property
    def died_wall(self) -> float | None:
        """When it died, on the wall clock."""
        return _first(number(self.death.get("wall")), number(self.exit.get("wall")))

    @property
    def crashed_at_exit(self) -> bool:
        """Whether an exception had ended it, and native code then crashed while the interpreter shut down."""
        speaker = self.speaker
        is_over = speaker is not None and speaker.left_in_order and speaker.exception is not None
        return is_over and self.status.signal in _CRASHES

    @property
    def end_t(self) -> float | None:
        """When it was over for the training: when the exception that ended it came to the top, else at its death.

        A process may take its time to leave, and what happens meanwhile did not end it.
        """
        note = self.exception
        raised, died = number(note.get("t")), self.died_t
        is_signal = self.status.signal is not None and not self.crashed_at_exit
        if raised is None or note.get("uncaught") is False or is_signal:
            return died
        return raised if died is None else min(raised, died)

    @property
    def last_t(self) -> float | None:
        """The death, or the last thing recorded before the record stops."""
        return _first(self.died_t, number(self.last_sample.get("t")), number(self.attempt.get("t")))

    @property
    def last_wall(self) -> float | None:
        """As `last_t`, on the wall clock."""
        return _first(self.died_wall, number(self.last_sample.get("wall")), number(self.attempt.get("wall")))

    @property
    def ran_for(self) -> float | None:
        """Seconds from the start to the death, or to the last thing recorded."""
        start, end = number(self.attempt.get("t")), self.last_t
        return end - start if start is not None and end is not None and end >= start else None

    @property
    def last_sample(self) -> dict[str, Any]:
        """The newest sample; empty when there is none."""
        return self.samples[-1] if self.samples else {}

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, oldest first."""
        return [event for event in self.events if event.get("kind") == kind]

    @property
    def main(self) -> ProcessNotes | None:
        """The notes of the training process itself."""
        return self.processes.get(self.pid) if self.pid is not None else None

    @property
    def speaker(self) -> ProcessNotes | None:
        """Whose notes are about this death: the training process, or the child whose end it merely passed on.

        A shell or a launcher is not instrumented; the Python it ran is. A note of any other process of the tree
        says nothing about the end of this one.
        """
        if self.main is not None and not self.main.is_messenger:
            return self.main
        lost = lost_child(self.main.exception or {}) if self.main is not None else None
        if lost is not None and lost.pids:  # the launcher says whose end it passes on
            notes = self.processes.get(lost.pids[0])
            return notes if notes and notes.exception and lost.status.exit_code == 1 else self.main
        if self.status.known:
            for death in reversed(self.child_deaths):
                notes = self.processes.get(death.pid or 0)
                if notes and self.status.exit_code and death.status.shell_code == self.status.exit_code:
                    return notes
            return self.main or self._unfollowed_child()
        if self.main is not None:
            return self.main
        return next(iter(self.processes.values())) if len(self.processes) == 1 else None

    @property
    def exception(self) -> dict[str, Any]:
        """The exception that nobody caught, as its process noted it; empty where there is none."""
        return (self.speaker.exception if self.speaker else None) or {}

    @property
    def unfinished(self) -> list[ProcessNotes]:
        """The processes that were watched from inside and did not say that they end in order."""
        return [
            notes
            for notes in self.processes.values()
            if not (notes.note and notes.note.get("kind") == "exit")
        ]

    def _unfollowed_child(self) -> ProcessNotes | None:
        """The one Python of a shell that failed and whose death nobody saw, if its last words fit the exit code."""
        failed, code = self.unfinished, self.status.exit_code or 0
        if len(failed) != 1:
            return None
        crashed = signal_of(headline(failed[0].fault.text) or "")
        is_it = (failed[0].exception and code == 1) or (crashed is not None and code == 128 + crashed)
        return failed[0] if is_it else None

    @property
    def own_death(self) -> ProcessDeath:
        """The death of the training process."""
        log = mapping(self.death.get("kernel_log"))
        return ProcessDeath(
            self.pid, self.command, self.status, self.died_t, self.died_wall, mapping(self.death.get("counters")),
            _lines(log.get("lines")), count(self.last_sample.get("rss")), "death.json",
        )  # fmt: skip

    @property
    def child_deaths(self) -> list[ProcessDeath]:
        """The deaths of processes it had started, in order of time."""
        deaths = []
        for event in self.events_of("process-death"):
            if count(event.get("pid")) == self.pid:
                continue
            deaths.append(ProcessDeath(
                count(event.get("pid")), text(event.get("name")) or "a child process",
                make_status(integer(event.get("status")), "events.jsonl"),
                number(event.get("t")), number(event.get("wall")), mapping(event.get("counters")),
                _lines(event.get("kernel_log")), count(event.get("rss")), "events.jsonl",
                number(event.get("since")), event.get("role") == ROLE,
            ))  # fmt: skip
        return deaths

    @property
    def parent_death(self) -> ParentDeath | None:
        """The end of the process that had started this one, if that came first."""
        event = next(iter(reversed(self.events_of("parent-death"))), None)
        if event is None:
            return None
        death = ProcessDeath(
            count(event.get("pid")), text(event.get("name")) or "its parent",
            make_status(integer(event.get("status")), "events.jsonl"),
            number(event.get("t")), number(event.get("wall")), mapping(event.get("counters")),
            _lines(event.get("kernel_log")), None, "events.jsonl",
        )  # fmt: skip
        return ParentDeath(death, event.get("awaited") is True, event.get("together") is True)

    @property
    def parent_age(self) -> float | None:
        """Seconds between the parent's end and this one's; None when one of them is not known."""
        parent, end = self.parent_death, self.died_t
        if parent is None or parent.death.t is None or end is None:
            return None
        return max(0.0, end - parent.death.t)

    @property
    def clock_jumped(self) -> bool:
        """Whether times of the wall clock cannot be compared over this attempt."""
        return any(abs(number(event.get("jump")) or 0.0) > 2.0 for event in self.events_of("clock"))

    def seconds_before_death(self, wall: float | None) -> float | None:
        """How long before the end something happened; None when the clocks do not let us say."""
        end = self.last_wall
        if wall is None or end is None or self.clock_jumped:
            return None
        # A file time later than the death by more than the slack of a sample belongs to a copy of the folder.
        return max(0.0, end - wall) if end - wall > -3.0 else None


def load(folder: str) -> Evidence:
    """Read an attempt folder."""
    attempt = read_json(os.path.join(folder, "attempt.json")) or {}
    pid = count(attempt.get("pid"))
    events = read_events(folder)
    death = _of_process(read_json(os.path.join(folder, "death.json")), pid)
    samples = list(read_samples(folder, _SAMPLES_TAIL))
    lost = _lost_samples(death, samples)
    return Evidence(
        folder=os.path.abspath(folder),
        attempt=attempt,
        exit=_of_process(read_json(os.path.join(folder, "exit.json")), pid),
        death=death,
        events=tuple(events),
        processes=_processes(folder),
        samples=tuple(samples) if lost is None else (),
        now=observe(attempt),
        is_death_damaged=_is_damaged(os.path.join(folder, "death.json")),
        lost_samples=lost,
    )


def _is_damaged(path: str) -> bool:
    return os.path.lexists(path) and read_json(path) is None


def _of_process(record: dict[str, Any] | None, pid: int | None) -> dict[str, Any]:
    """A record, unless it speaks of another process than the attempt does."""
    if not record or (pid and count(record.get("pid")) not in (None, pid)):
        return {}
    return record


def _processes(folder: str) -> dict[int, ProcessNotes]:
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    pids = sorted({pid for name in names if name[:8] == "process-" and (pid := whole_number(name[8:]))})
    most = _TEXT_MOST // max(1, len(pids) // _MANY_PROCESSES)
    return {pid: _notes(os.path.join(folder, f"process-{pid}"), pid, most) for pid in pids}


def _notes(folder: str, pid: int, most: int) -> ProcessNotes:
    beacon = read_beacon(os.path.join(folder, "beacon"))
    notes = ProcessNotes(
        pid=pid,
        fault=_dump(folder, "fault.txt", most),
        stacks=_dump(folder, "stacks.txt", most),
        signals=tuple((name, _dump(folder, f"{name}.txt", most)) for name in SIGNAL_FILES),
        cells=_dump(folder, "cells", most).text,
    )
    if beacon is None:
        return notes
    return notes._replace(step=count(beacon.step) or None, step_t=number(beacon.step_t), epoch=integer(beacon.epoch),
        phase=text(beacon.phase), cell=text(beacon.cell), note=beacon.note, fatal=beacon.fatal,
    )  # fmt: skip


def _dump(folder: str, name: str, most: int) -> Dump:
    try:
        data, wall = read_end(os.path.join(folder, name), most)
    except OSError:
        return Dump()
    return Dump(data.decode("utf-8", "replace"), wall) if data else Dump()


def _lost_samples(death: dict[str, Any], samples: list[dict[str, Any]]) -> str | None:
    """Whether the sample that the death record speaks of is missing: a folder that was copied in part, a full disk."""
    died, age = number(death.get("t")), number(death.get("last"))
    if died is None or age is None:
        return None
    newest = number(samples[-1].get("t")) if samples else None
    if newest is not None and died - newest <= age + _SAMPLES_SLACK:
        return None
    here = "there is none"
    if newest is not None:
        here = f"the newest is from {format_duration(died - newest)} before the end"
    until = "the end" if age < 1.0 else f"{format_duration(age)} before it"
    return f"samples are missing from this folder: {here}, and the recorder took some up to {until}"


def _lines(value: object) -> tuple[dict[str, Any], ...]:
    """Kernel log lines, given as texts or as `{"t", "text"}`."""
    if not isinstance(value, list):
        return ()
    found = [{"t": None, "text": item} if isinstance(item, str) else item for item in value]
    return tuple(item for item in found if isinstance(item, dict) and text(item.get("text")))


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def observe(attempt: dict[str, Any]) -> Now:
    """Look at this machine in the light of attempt.json."""
    same_boot = _same(text(attempt.get("boot_id")), host.boot_id())
    same_host = _same(text(attempt.get("hostname")), host.hostname())
    start, start_now = count(attempt.get("pid1_start")), host.pid1_start()
    same_container = None if start is None or start_now is None else start == start_now
    here = same_boot is not False and same_host is not False and same_container is not False
    if here or not same_boot or not host.initial_pid_namespace():
        alive = here and _lives(attempt)
        stopped = alive and _state(attempt) in ("T", "t")
        return Now(time.time(), same_boot, same_host, same_container, alive, False, stopped)
    # From outside a container its processes can be seen, under other pids.
    return Now(time.time(), same_boot, same_host, same_container, _lives_in_container(attempt), True)


def _lives(attempt: dict[str, Any]) -> bool:
    """Whether this pid is still the same process: running, and at least as old as the attempt."""
    pid, began = count(attempt.get("pid")), number(attempt.get("t"))
    if not pid:
        return False
    stat = procfs.stat_of(pid)
    if stat is None or stat.state in ("Z", "X"):
        return False
    start = count(attempt.get("start_ticks"))
    if start is not None:
        return bool(stat.start_ticks == start)
    if began is None:
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return bool(age >= time.monotonic() - began - _SLACK)


def _state(attempt: dict[str, Any]) -> str | None:
    stat = procfs.stat_of(count(attempt.get("pid")) or 0)
    return stat.state if stat is not None else None


def _lives_in_container(attempt: dict[str, Any]) -> bool:
    """Whether a process of the same inner pid and the same start exists in a PID namespace below ours."""
    pid, start = count(attempt.get("pid")), count(attempt.get("start_ticks"))
    if not pid or start is None:
        return False
    if not os.path.isdir("/proc"):
        return False  # a Mac, Windows: nothing of that run is here
    for name in os.listdir("/proc"):
        stat = procfs.stat_of(name) if name.isdigit() else None
        if stat is None or stat.start_ticks != start or stat.state in ("Z", "X"):
            continue
        for line in procfs.read_bytes(f"/proc/{name}/status").split(b"\n"):
            if line.startswith(b"NSpid:") and line.split()[-1] == b"%d" % pid:
                return True
    return False


def _same(then: str | None, now: str | None) -> bool | None:
    return None if then is None or now is None else then == now
