"""Another process of the training failed first: a DataLoader worker, a rank, or the command that a shell ran."""

from __future__ import annotations

import os
from typing import Literal

from buoy.text import printable
from buoy.units import format_bytes
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes import memory, signals
from buoy.verdict.causes.common import (
    AT_SHUTDOWN,
    Raised,
    ViolentDeath,
    age_of,
    before,
    died_before,
    end_of,
    is_relay,
    raised,
    raised_as,
    status_reading,
    violent_deaths,
    weaker,
)
from buoy.verdict.causes.exits import after_timeout, timeout_that_killed
from buoy.verdict.evidence import Evidence, ProcessDeath
from buoy.verdict.exceptions import BrokenLine, ExceptionFinding, LostChild, broken_line, pids_in
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import SIGKILL, OomFinding, describe_limit, examine, unrecorded_victim
from buoy.verdict.stacks import headline, signal_of
from buoy.verdict.status import make_status

# Words with which a parent reports that a child of its own is gone.
_REPORTS = (
    "DataLoader worker", "exited unexpectedly", "terminated with signal", "terminated abruptly", "died with <Signals.",
    "process pool", "worker died", "Worker exited", "worker process",
)  # fmt: skip
_AT_ONCE = 5.0
"""Seconds within which a shell that passes on the end of its command has ended too."""
_SOON = 10.0
"""Seconds within which a wrapper that gives up because of its command's end has ended too, with whatever code."""
_REPORTED = 60.0
"""Seconds after which a report that names nobody may mean another child than the last that died."""
_UNNOTICED = 300.0
"""Seconds for which a line of one's own making may stay broken before anyone reads from it."""

Link = Literal["named", "reported", "passed on", "relayed", "followed", "broken line", "silent", "words"]
_RANKS: tuple[Link, ...] = ("broken line", "followed", "passed on", "reported", "named")
_SURE: tuple[Link, ...] = ("named", "reported", "passed on")
_WRAPPED: tuple[Link, ...] = ("passed on", "relayed", "followed", "silent")
"""What died is the training itself, below a shell, a launcher or another wrapper."""

_Found = tuple[ProcessDeath, Link, float | None, OomFinding | None]


def judge_worker_killed(evidence: Evidence) -> Cause | None:
    """`worker-killed`: a process that it had started died first.

    Certain when the child's own death is, and the parent's last words or exit code point to that child.
    """
    if evidence.status.exit_code == 0 or not evidence.is_dead:
        return None
    if evidence.status.signal is not None and not evidence.crashed_at_exit:
        return None
    ended = raised(evidence)
    if ended is not None and ended.lost is not None and ended.lost.status.exit_code is not None:
        return None  # it left with a code by itself
    found = _guilty_child(evidence, ended) or _unrecorded_child(evidence, ended)
    return _cause(evidence, found, ended) if found is not None else None


def judge_relayed(evidence: Evidence) -> Cause | None:
    """`worker-killed`, of a wrapper that passes on how its command ended.

    Likely at most: that a wrapper took its own life, as its command had lost it, is known of some by name only.
    """
    signal = evidence.status.signal
    if signal is None or is_relay(evidence) is False or signal in AT_SHUTDOWN:
        return None
    own = examine(evidence, evidence.own_death)
    if own.answer == "oom" and own.grade == "certain":
        return None
    if timeout_that_killed(evidence) is not None:
        return None  # it killed both
    for child in reversed(evidence.child_deaths):
        if died_before(evidence, child, _AT_ONCE) is None or child.is_ours:
            continue
        found = _relayed(evidence, child, signal)
        if found is not None:
            return _cause(evidence, found, None)
    return None


def _relayed(evidence: Evidence, child: ProcessDeath, signal: int) -> _Found | None:
    """This child, if it is the command whose signal the wrapper took over."""
    if child.status.signal != signal and (child.status.known or not is_relay(evidence)):
        return None
    # Of one whose end nobody could read, the wrapper's own end tells it.
    child = child if child.status.known else child._replace(status=make_status(signal, "death.json"))
    oom = examine(evidence, child) if signal == SIGKILL else None
    if oom is not None and oom.answer != "oom" and not is_relay(evidence):
        return None
    return child, "relayed", age_of(evidence, child), oom


def _cause(evidence: Evidence, found: _Found, ended: Raised | None) -> Cause:
    child, link, age, oom = found
    how, grade = _how(evidence, child, oom)
    lost = ended.lost if ended is not None else None
    is_late = age is not None and age > _REPORTED and link != "named"
    if link not in _SURE or is_late or (lost is not None and lost.is_in_chain):
        grade = weaker(grade, "likely")
    name = lost.who if lost is not None and lost.pids else child.name
    who = f"{printable(name, 60)} (pid {child.pid})" if child.pid else f"{name[0].upper()}{name[1:]}"
    claim = Claim(f"{who} {how}; {_effect(evidence, link)}", grade, _readings(evidence, child, oom))
    cascade: tuple[Claim, ...] = ()
    if age is not None:
        reading = Reading(str(child.status), child.source, child.wall)
        words = f"pid {child.pid} died {before(age, end_of(evidence))}: {child.status}"
        cascade = (Claim(words, "certain", (reading,)),)
    actor = Claim("the Linux kernel", grade) if oom and oom.answer == "oom" else None
    steps = _next_of_itself(evidence, child, oom) if link in _WRAPPED else _next(evidence, child, oom)
    return Cause("worker-killed", claim, actor, cascade, steps, survivable=True)


def _unrecorded_child(evidence: Evidence, ended: Raised | None) -> _Found | None:
    """A child that lived too shortly for the recorder to follow it: the kernel's own records may still show."""
    link: Link
    if ended is not None and ended.lost is not None and ended.lost.status.signal not in (None, 9):
        return _from_words(evidence, ended.lost)
    if ended is not None and (ended.lost is not None or _reports_loss(ended.finding)):
        link = "named"
        pids = list(ended.lost.pids if ended.lost else pids_in(ended.finding.message))
    elif ended is not None and _broken_line(evidence) == "to a child":
        link, pids = "broken line", []
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
    violent = {(child.death.pid, child.death.t): child for child in violent_deaths(evidence)}
    for child in evidence.child_deaths:
        age, found = age_of(evidence, child), violent.get((child.pid, child.t))
        if age is None or child.is_ours or child.status.exit_code is not None:
            continue  # of one that left with a code by itself, the exception or the code says more
        if ended is not None:
            link = _link_by_words(evidence, child, found, age, ended)
        else:
            link = _link_by_code(evidence, child, found, age)
        rank = _RANKS.index(link) if link is not None else -1
        if link is not None and (best is None or rank >= best[0]):
            best = (rank, child, link, age)
    if best is None:
        return None
    _, child, link, age = best
    if not child.status.known and ended is not None and ended.lost is not None:
        child = child._replace(status=ended.lost.status)
        link = link if ended.lost.exact else "words"
    return child, link, age, examine(evidence, child) if child.status.signal in (None, 9) else None


def _link_by_code(
    evidence: Evidence, child: ProcessDeath, found: ViolentDeath | None, age: float
) -> Link | None:
    """What the code of a process without an exception has to do with this child's death."""
    code, signal = evidence.status.exit_code, child.status.signal or SIGKILL
    if evidence.main is None and code == 128 + signal and age <= _AT_ONCE:
        return "passed on"
    if code is None or found is None:
        return None
    if code in (128 + signal, 256 - signal, signal):  # a shell's way, Python's, and that of `setsid --wait`
        return "followed"
    if age > _SOON:
        return None
    # A Python that was watched from inside may have ended its own child, with SIGKILL too, before it left.
    main = evidence.main
    is_meant = main is None or (main.left_in_order and (signal != SIGKILL or found.by_kernel))
    return "followed" if is_meant else None


def _link_by_words(
    evidence: Evidence, child: ProcessDeath, found: ViolentDeath | None, age: float, ended: Raised
) -> Link | None:
    """What an exception has to do with this child's death."""
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
    line = _broken_line(evidence)
    if found is None:
        # It ended somehow; that a line to a child broke just then tells that it mattered.
        is_it = line == "to a child" and not child.status.known and age <= _SOON
        return "broken line" if is_it else None
    if reports:
        return "reported"
    if line == "to a child" or (line == "to anyone" and age <= _UNNOTICED):
        return "broken line"
    return None


def _broken_line(evidence: Evidence) -> BrokenLine | None:
    return broken_line(evidence.exception)


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
    program = printable(_program(evidence), 40)
    if link in ("passed on", "silent"):
        return f"`{program}` passed that on as exit code {evidence.status.exit_code}"
    if link == "relayed":
        return f"`{program}` then ended itself by the same signal"
    if link == "followed":
        return f"`{program}`, which had started it, then ended with exit code {evidence.status.exit_code}"
    return "the training then stopped with an exception"


def _program(evidence: Evidence) -> str:
    """What was started, by name: `make`, `python launch.py`."""
    words = evidence.command.split(" ")
    names = [os.path.basename(word) for word in words[: 2 if evidence.main is not None else 1]]
    return " ".join(names)


def _readings(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[Reading, ...]:
    ended = raised(evidence)
    own = Reading(ended.finding.short, ended.evidence[0].source) if ended else status_reading(evidence)
    signal = child.status.signal
    notes = evidence.processes.get(child.pid or 0) if signal in signals.WORDS else None
    return (
        *(oom.evidence if oom else ()),
        Reading(
            f"{f'pid {child.pid}' if child.pid else child.name}: {child.status}", child.source, child.wall
        ),
        *signals.stack_reading(notes),
        own,
    )


def _next(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[str, ...]:
    if oom is None or oom.answer == "not-oom":
        return (_see_its_error(evidence, child), how_to_resume(evidence))
    limit, _ = describe_limit(evidence)
    held = f" (this one held {format_bytes(child.rss)})" if child.rss else ""
    return (
        f"lower `num_workers`{held}: all workers share the limit of {format_bytes(limit)}",
        "keep the data set out of Python lists: arrays or memory-mapped files are not copied per worker",
        how_to_resume(evidence),
    )


def _next_of_itself(evidence: Evidence, child: ProcessDeath, oom: OomFinding | None) -> tuple[str, ...]:
    """What a shell ran is the training itself, and no worker of one."""
    signal = child.status.signal
    if signal in signals.WORDS:
        return signals.advice(evidence, evidence.processes.get(child.pid or 0), signal)
    timer = timeout_that_killed(evidence)
    if timer is not None and signal == SIGKILL:
        return after_timeout(evidence, timer)
    if signal == signals.SIGXCPU:
        return (signals.ADVICE, how_to_resume(evidence))
    if oom is not None and oom.answer != "not-oom":
        limit, peak = describe_limit(evidence)
        return (*memory.remedies(evidence, limit, peak, has_workers=False)[:2], how_to_resume(evidence))
    return (
        how_to_resume(evidence),
        "if you did not: look for a message of the scheduler or platform at that time",
    )


def _see_its_error(evidence: Evidence, child: ProcessDeath) -> str:
    """How the lost child's own last words can be seen."""
    ended = raised(evidence)
    who = ended.lost.who if ended is not None and ended.lost is not None else ""
    if who.startswith(("rank", "a rank", "process ", "the command", "a spawned")):
        return f"read what {who} itself printed last; its parent only passes its end on"
    if child.status.signal in (SIGKILL, *AT_SHUTDOWN):
        return "it had no error; if you did not end it, look for what else may send signals here"
    if who == "DataLoader worker" and _left_unseen(evidence, child):
        return "look in the data set's code for what ends a process (`os._exit`, `exit`); then run with `num_workers=0`"
    if "pool" in who:
        return "call the function once without the pool, in the main process: its own error then shows"
    return "run once with `num_workers=0` (no child processes): the worker's own error then shows"


def judge_distributed(evidence: Evidence) -> Cause | None:
    """`distributed`: another rank died or fell silent, and this one noticed.

    Likely: the words of the library speak of a peer, whose own end is recorded elsewhere if at all.
    """
    found = raised_as(evidence, "distributed")
    if found is None:
        return None
    message = found.finding.message.lower()
    silent = "timeout" in message or "timed out" in message
    what = "Another rank did not answer in time" if silent else "The connection to another rank broke"
    return Cause(
        id="distributed",
        claim=Claim(what, weaker(found.grade, "likely"), found.evidence),
        actor=Claim("a rank that died or hangs; this process is not the one to blame", "likely"),
        cascade=found.cascade,
        next=("look at the other ranks' logs: `buoy why` on the run of the rank that ended first",
              "`TORCH_DISTRIBUTED_DEBUG=DETAIL` names the collective that did not match", how_to_resume(evidence)),
        survivable=True,
    )  # fmt: skip
