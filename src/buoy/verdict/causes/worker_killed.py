"""A process it had started died first: a DataLoader worker, a rank, or the command that a shell ran."""

from __future__ import annotations

import os
from typing import Literal

from buoy.units import format_bytes, format_duration
from buoy.verdict.causes import kernel_oom, native_crash
from buoy.verdict.causes.common import Raised, died_before, raised, status_reading, weaker
from buoy.verdict.causes.exit_code import after_timeout
from buoy.verdict.evidence import Evidence, ProcessDeath
from buoy.verdict.exceptions import ExceptionFinding
from buoy.verdict.going_on import go_on
from buoy.verdict.lost_child import LostChild, pids_in
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import OomFinding, describe_limit, examine, unrecorded_victim
from buoy.verdict.status import make_status
from buoy.verdict.time_command import time_command
from buoy.verdict.traces import headline, signal_of
from buoy.verdict.values import printable

# Words with which a parent reports that a child of its own is gone.
_REPORTS = (
    "DataLoader worker", "exited unexpectedly", "terminated with signal", "terminated abruptly", "died with <Signals.",
    "process pool", "worker died", "Worker exited", "worker process",
)  # fmt: skip
_BROKEN_LINES = (
    "EOFError",
    "BrokenPipeError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
)
_AT_SHUTDOWN = (1, 2, 15)
"""Signals with which a parent ends its own workers in order."""

Link = Literal["named", "reported", "passed on", "broken line", "silent", "words"]


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the child's own death is, and the parent's last words or exit code point to that child."""
    if evidence.status.signal is not None or evidence.status.exit_code == 0 or not evidence.is_dead:
        return None
    ended = raised(evidence)
    if ended is not None and ended.lost is not None and ended.lost.status.exit_code is not None:
        return None  # it left with a code by itself
    found = _guilty_child(evidence, ended) or _unrecorded_child(evidence, ended)
    if found is None:
        return None
    child, link, age, oom = found
    how, grade = _how(evidence, child, oom)
    if link in ("broken line", "silent", "words"):
        grade = weaker(grade, "likely")
    name = ended.lost.who if ended is not None and ended.lost is not None and ended.lost.pids else child.name
    who = f"{printable(name, 60)} (pid {child.pid})" if child.pid else f"{name[0].upper()}{name[1:]}"
    claim = Claim(
        f"{who} {how}; {_effect(evidence, link)}",
        grade,
        _readings(evidence, child, oom),
    )
    cascade: tuple[Claim, ...] = ()
    if age is not None:
        reading = Reading(str(child.status), child.source, child.wall)
        when = "at the end" if age < 0.1 else f"{format_duration(round(age, 1))} before the end"
        words = f"pid {child.pid} died {when}: {child.status}"
        cascade = (Claim(words, "certain", (reading,)),)
    actor = Claim("the Linux kernel", grade) if oom and oom.answer == "oom" else None
    steps = _next(evidence, child, oom)
    if link in ("passed on", "silent"):
        steps = _next_of_itself(evidence, child, oom)
    return Cause("worker-killed", claim, actor, cascade, steps, survivable=True)


_Found = tuple[ProcessDeath, Link, float | None, OomFinding | None]


def _unrecorded_child(evidence: Evidence, ended: Raised | None) -> _Found | None:
    """A child that lived too shortly for the recorder to follow it: the kernel's own records may still tell."""
    link: Link
    if ended is not None and ended.lost is not None and ended.lost.status.signal not in (None, 9):
        return _from_words(evidence, ended.lost)
    if ended is not None and (ended.lost is not None or _reports_loss(ended.finding)):
        link = "named"
        pids = list(ended.lost.pids if ended.lost else pids_in(ended.finding.message))
    elif ended is None and evidence.main is None:
        link, pids = "passed on", []
        if evidence.status.exit_code != 137:
            return _silent_child(evidence)
    else:
        return None
    victim = unrecorded_victim(evidence, pids)
    if victim is not None:
        return victim[0], link, None, victim[1]
    if ended is not None:
        return _from_words(evidence, ended.lost) if ended.lost else None
    return _silent_child(evidence)


def _from_words(evidence: Evidence, lost: LostChild) -> _Found:
    """A child of which nothing is known but what its parent said when it was gone."""
    pid = lost.pids[0] if lost.pids else None
    child = evidence.own_death._replace(
        pid=pid, name=lost.who, status=lost.status, rss=None, source=_speaker_source(evidence)
    )
    link: Link = "named" if lost.exact else "words"
    return child, link, None, examine(evidence, child) if lost.status.signal == 9 else None


def _speaker_source(evidence: Evidence) -> str:
    return evidence.speaker.source if evidence.speaker else "events.jsonl"


def _silent_child(evidence: Evidence) -> _Found | None:
    """The one Python that a shell ran and nobody followed: it crashed with a last word, or was killed without one."""
    code = evidence.status.exit_code or 0
    for notes in evidence.unfinished if len(evidence.unfinished) == 1 else ():
        signal = signal_of(headline(notes.fault.text) or "")
        if signal is None and not notes.note and not notes.fault.text:
            signal = 9
        if signal is not None and code == 128 + signal:
            status = make_status(signal, evidence.status.source)
            child = evidence.own_death._replace(
                pid=notes.pid, name="a child process", status=status, rss=None
            )
            return child, "silent", None, examine(evidence, child) if signal == 9 else None
    return None


def _guilty_child(evidence: Evidence, ended: Raised | None) -> _Found | None:
    best: tuple[int, ProcessDeath, Link, float] | None = None
    for child in evidence.child_deaths:
        age = died_before(evidence, child, 120.0)
        if age is None or (child.status.exit_code is not None and child.status.exit_code == 0):
            continue
        link = _link(evidence, child, age, ended)
        if link is None:
            continue
        rank = ("broken line", "passed on", "reported", "named").index(link)
        if best is None or rank >= best[0]:
            best = (rank, child, link, age)
    if best is None:
        return None
    _, child, link, age = best
    if not child.status.known and ended is not None and ended.lost is not None:
        child = child._replace(status=ended.lost.status)
        link = link if ended.lost.exact else "words"
    return child, link, age, examine(evidence, child) if child.status.signal in (None, 9) else None


def _link(evidence: Evidence, child: ProcessDeath, age: float, ended: Raised | None) -> Link | None:
    if ended is not None:
        return _link_by_words(evidence, child, age, ended)
    code = evidence.status.exit_code
    # A Python that was watched and left no exception chose its code itself; a shell passes on what its child gave.
    if (
        child.status.signal is not None
        and code == child.status.shell_code
        and age <= 5.0
        and evidence.main is None
    ):
        return "passed on"
    if not child.status.known and code == 137 and age <= 5.0 and evidence.main is None:
        return "passed on"
    return None


def _link_by_words(evidence: Evidence, child: ProcessDeath, age: float, ended: Raised) -> Link | None:
    if child.status.signal is None and child.status.known:
        return None  # it left with a code by itself: the exception says more
    finding, lost = ended.finding, ended.lost
    if lost is not None and lost.pids:
        return "named" if child.pid in lost.pids else None
    if (
        lost is not None
        and child.status.known
        and lost.status.known
        and lost.status.signal != child.status.signal
    ):
        return None
    reports = lost is not None or _reports_loss(finding)
    if reports and child.pid in pids_in(finding.message):
        return "named"
    if child.status.signal in _AT_SHUTDOWN or not _fatal(evidence, child):
        return None
    if reports and age <= 60.0:
        return "reported"
    if finding.type.removeprefix("builtins.") in _BROKEN_LINES and age <= 10.0:
        return "broken line"
    return None


def _fatal(evidence: Evidence, child: ProcessDeath) -> bool:
    """Whether this death was no ordinary end; without a status only a kill by the kernel is known to be none."""
    return child.status.signal is not None or examine(evidence, child).answer == "oom"


def _reports_loss(finding: ExceptionFinding) -> bool:
    """Whether an exception says that a child process is gone."""
    return any(word in finding.message for word in _REPORTS)


def _how(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[str, Grade]:
    if oom is not None and oom.answer == "oom":
        return "was killed by the kernel's OOM killer", oom.grade
    if _left_unseen(evidence, child):
        return (
            "left by itself with exit code 0, or ended too soon to be watched",
            "likely",
        )
    if child.status.signal is None:
        return "ended, and how is not known", "likely"
    if child.status.signal == 9:
        if oom is not None and oom.answer == "not-oom":
            return "was killed with SIGKILL by someone, not by the kernel's OOM killer", oom.grade
        return "was killed with SIGKILL, by the kernel's OOM killer or by someone", "likely"
    return f"died of {child.status}", "certain"


def _left_unseen(evidence: Evidence, child: ProcessDeath) -> bool:
    """Whether a recorder that was there saw no death: it notes every one that it can follow, but those with code 0."""
    return bool(evidence.death) and child.source != "events.jsonl" and not child.status.known


def _effect(evidence: Evidence, link: Link) -> str:
    if link in ("passed on", "silent"):
        program = os.path.basename(evidence.command.split(" ", 1)[0])
        return f"`{program}` passed that on as exit code {evidence.status.exit_code}"
    return "the training stopped with an exception because of it"


def _readings(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[Reading, ...]:
    ended = raised(evidence)
    own = Reading(ended.finding.short, ended.evidence[0].source) if ended else status_reading(evidence)
    signal = child.status.signal
    notes = evidence.processes.get(child.pid or 0) if signal in native_crash.WORDS else None
    return (
        *(oom.evidence if oom else ()),
        Reading(
            f"{f'pid {child.pid}' if child.pid else child.name}: {child.status}", child.source, child.wall
        ),
        *native_crash.stack_reading(notes),
        own,
    )


def _next(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[str, ...]:
    if oom is None or oom.answer == "not-oom":
        return (_see_its_error(evidence, child), go_on(evidence))
    limit, _ = describe_limit(evidence)
    held = f" (this one held {format_bytes(child.rss)})" if child.rss else ""
    return (
        f"lower `num_workers`{held}: all workers share the limit of {format_bytes(limit)}",
        "keep the data set out of Python lists: arrays or memory-mapped files are not copied per worker",
        go_on(evidence),
    )


def _next_of_itself(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[str, ...]:
    """What a shell ran is the training itself, and no worker of one."""
    signal = child.status.signal
    if signal in native_crash.WORDS:
        return native_crash.advice(evidence, evidence.processes.get(child.pid or 0), signal)
    timer = time_command(evidence.attempt.get("command"))
    if timer is not None and timer.kills and signal == 9 and (evidence.ran_for or 0.0) >= timer.seconds:
        return after_timeout(evidence, timer)
    if oom is not None and oom.answer != "not-oom":
        limit, peak = describe_limit(evidence)
        return (*kernel_oom.remedies(evidence, limit, peak, has_workers=False)[:2], go_on(evidence))
    return (go_on(evidence), "if it was not you: look for a scheduler's or platform's message at that time")


def _see_its_error(evidence: Evidence, child: ProcessDeath) -> str:
    """How the lost child's own last words can be seen."""
    ended = raised(evidence)
    who = ended.lost.who if ended is not None and ended.lost is not None else ""
    if who.startswith(("rank", "a rank", "process ", "the command", "a spawned")):
        return f"read what {who} itself printed last; its parent only passes its end on"
    if child.status.signal in (9, *_AT_SHUTDOWN):
        return "it had no error of its own; if it was not you who ended it: look for who else may send signals here"
    if who == "DataLoader worker" and _left_unseen(evidence, child):
        return "look in the data set's code for what ends a process (`os._exit`, `exit`); then run with `num_workers=0`"
    if "pool" in who:
        return "call the function once without the pool, in the main process: its own error then shows"
    return "run once with `num_workers=0` (no child processes): the worker's own error then shows"
