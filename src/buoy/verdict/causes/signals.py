"""A signal ended the process: from the system, from a user, or from a crash in native code."""

from __future__ import annotations

import os

from buoy.fields import mapping, number
from buoy.machine.kernel_log import parse_segfault
from buoy.text import printable, typed
from buoy.units import format_bytes, format_duration
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes.common import (
    end_readings,
    is_relay,
    raised_as,
    recent_signal,
    signal_sender,
    status_reading,
    weaker,
)
from buoy.verdict.causes.exits import after_timeout, timeout_that_killed
from buoy.verdict.evidence import Evidence, ProcessNotes
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import describe_limit, examine
from buoy.verdict.stacks import headline, is_recursion, last_stack, signal_of, user_frame
from buoy.verdict.status import signal_name

SIGXCPU, SIGKILL = 24, 9
_SAMPLED = 0.5
"""The last reading may be this much (seconds) behind the death."""
ADVICE = "`ulimit -t` shows the limit; raise it where the job is submitted, or `ulimit -t unlimited`"
_TICKS_AHEAD = 0.7
"""The kernel counts whole ticks for its limit: it kills who has used four fifths of it by the exact count."""
_READ_EVERY = 1.0
_LATE = 1.5
"""A kernel without a regular tick accounts for a busy core only about once a second."""


def judge_cpu_limit(evidence: Evidence) -> Cause | None:
    """`cpu-limit`: RLIMIT_CPU was used up: SIGXCPU at the soft limit, SIGKILL at the hard one.

    Certain when the signal fits and the CPU time is at the limit; the same signal sent by hand does not fit.
    """
    cpu = mapping(evidence.death.get("cpu"))
    used, hard = number(cpu.get("used")), number(cpu.get("hard_limit"))
    known = evidence.status.known
    grade: Grade | None
    if evidence.status.signal == SIGXCPU or (
        not known and recent_signal(evidence, "SIGXCPU", 5.0) is not None
    ):
        grade, limit = _at_soft_limit(evidence, used, cpu)
    elif evidence.status.signal == SIGKILL or (not known and not (evidence.main and evidence.main.note)):
        grade, limit = _at(evidence, used, hard), hard
        if grade and known and examine(evidence, evidence.own_death).answer == "open":
            grade = "likely"
    else:
        return None
    if grade is None or limit is None:
        return None
    grade = grade if known else weaker(grade, "likely")
    words = f"CPU time used, last seen: {format_duration(used)} of {format_duration(limit)}"
    readings = (Reading(words, "death.json", evidence.died_wall), *end_readings(evidence))
    return Cause(
        id="cpu-limit",
        claim=Claim(
            f"It used up its limit of {format_duration(limit)} of CPU time (RLIMIT_CPU)",
            grade,
            readings,
        ),
        actor=Claim("the Linux kernel, by a limit that the shell or the batch system had set", grade),
        next=(ADVICE, how_to_resume(evidence)),
        survivable=True,
    )


def _at_soft_limit(
    evidence: Evidence, used: float | None, cpu: dict[str, object]
) -> tuple[Grade | None, float | None]:
    """How surely SIGXCPU was the kernel's, and which limit had been reached.

    The kernel raises the soft limit by a second when it sends the signal.
    """
    soft, before = number(cpu.get("soft_limit")), number(cpu.get("soft_before"))
    if soft is not None and before is not None and soft == before + 1.0:
        return "certain", before
    for limit in (soft, soft - 1.0 if soft is not None and soft > 1.0 else None):
        grade = _at(evidence, used, limit)
        if grade is not None:
            return (grade if limit == soft else "likely"), limit
    # Nobody else sends this signal, but by hand.
    return ("likely" if may_have_reached(evidence, soft) else None), soft


def may_have_reached(evidence: Evidence, limit: float | None) -> bool:
    """Whether nothing speaks against it that this limit was reached: half of it was used, as far as that is known."""
    used, exact = number(mapping(evidence.death.get("cpu")).get("used")), _exact(evidence)
    most = (used or 0.0) + _unread(evidence)
    return limit is not None and (most if exact is None else min(exact, most)) >= limit / 2


def _unread(evidence: Evidence) -> float:
    """CPU seconds that may have been used since the last reading: several threads use several in one."""
    return (_READ_EVERY + (number(evidence.death.get("gap")) or 0.0)) * (os.cpu_count() or 1)


def _exact(evidence: Evidence) -> float | None:
    """The parent's figure. It counts reaped children too, so it can clear the limit but not prove it."""
    rusage = mapping(evidence.exit.get("rusage"))
    parts = [number(rusage.get(key)) for key in ("utime", "stime")]
    return sum(part for part in parts if part is not None) if None not in parts else None


def _at(evidence: Evidence, used: float | None, limit: float | None) -> Grade | None:
    """How surely the process had used this much CPU time when it died."""
    if used is None or limit is None:
        return None
    exact = _exact(evidence)
    if exact is not None and exact < limit - 0.2:
        return "likely" if exact >= _TICKS_AHEAD * limit else None
    if limit - _SAMPLED <= used:
        return "certain"
    return "likely" if used >= max(limit / 4, limit - _LATE) else None


SIGTERM = 15
_TO_STOP = 30.0
"""A process that stops in order does so within this time of being asked, or for another reason."""


def judge_terminated(evidence: Evidence) -> Cause | None:
    """`terminated`: SIGTERM from a scheduler or a user; perhaps SIGKILL when it did not stop in time.

    Certain when SIGTERM ended it; when something else did shortly after a SIGTERM, what else there is decides.
    """
    status = evidence.status
    if status.signal == SIGTERM:
        seen = recent_signal(evidence, "SIGTERM", 5.0)
        readings = (status_reading(evidence), *((seen.reading,) if seen else ()))
        return _cause(evidence, Claim("It received SIGTERM", "certain", readings))
    if (found := raised_as(evidence, "terminated")) is not None:
        words = "It received SIGTERM, and its own handler ended it"
        return _cause(evidence, Claim(words, found.grade, found.evidence))
    seen = recent_signal(evidence, "SIGTERM", 60.0 if status.signal == SIGKILL else _TO_STOP)
    if seen is None:
        return None
    readings = (seen.reading, *end_readings(evidence))
    after = format_duration(seen.age)
    if status.signal == SIGKILL:
        # Both signals are certain; that the second followed from the first is, once the kernel is ruled out.
        oom = examine(evidence, evidence.own_death)
        grade: Grade = "certain" if oom.answer == "not-oom" and oom.grade == "certain" else "likely"
        words = f"It received SIGTERM and was killed (SIGKILL) {after} later"
        return _cause(evidence, Claim(words, grade, (*readings, *oom.evidence)))
    if status.signal is not None:
        return None
    if not status.known:
        if evidence.speaker and evidence.speaker.left_in_order:
            return _cause(
                evidence,
                Claim(f"It received SIGTERM and shut down cleanly {after} later", "likely", readings),
            )
        return _cause(
            evidence, Claim("It received SIGTERM; nothing is known of what followed", "likely", readings)
        )
    return _cause(
        evidence,
        Claim(f"It received SIGTERM and ended by itself {after} later ({status})", "likely", readings),
    )


def _cause(evidence: Evidence, claim: Claim) -> Cause:
    actor = signal_sender(evidence, "SIGTERM")
    in_notebook = evidence.is_kernel
    senders = "a notebook's restart or shutdown, " if in_notebook else ""
    ask = "look at the platform's notices"
    if not in_notebook:
        ask = f"ask the scheduler (SLURM: `sacct -j JOB`) or {ask}"
    return Cause(
        id="terminated",
        claim=claim,
        actor=actor
        or Claim(f"not recorded: {senders}a scheduler, the platform (preemption) or a user", "possible"),
        next=(
            how_to_resume(evidence),
            f"if you did not, {ask}",
        ),
        # What reached `buoy run` itself was meant for the whole job: starting again would defy it.
        survivable=actor is None,
    )


def judge_killed(evidence: Evidence) -> Cause | None:
    """`killed`: somebody sent SIGKILL, and it was not the kernel's OOM killer.

    Certain only if the kernel's counters were readable and unchanged, or its log accounts for every kill.
    """
    if evidence.status.signal != SIGKILL or not evidence.death:
        return None
    finding = examine(evidence, evidence.own_death)
    if finding.answer != "not-oom":
        return None
    done = (
        ", while it was shutting down normally" if evidence.speaker and evidence.speaker.left_in_order else ""
    )
    limit, peak = describe_limit(evidence)
    high = (
        f" (high memory, {format_bytes(peak)}, is no proof of one)"
        if limit and peak and peak > 0.8 * limit
        else ""
    )
    claim = Claim(
        f"Killed with SIGKILL by another process{done}; not the kernel's OOM killer{high}",
        weaker(finding.grade, "likely") if _may_be_its_own(evidence) else finding.grade,
        (status_reading(evidence), *finding.evidence),
    )
    timer = timeout_that_killed(evidence)
    if timer is not None:
        actor = Claim(f"`timeout {timer.word}` itself: its time was up", "likely")
        return Cause("killed", claim, actor, next=after_timeout(evidence, timer), survivable=True)
    return Cause(
        id="killed",
        claim=claim,
        actor=Claim("not recorded: `kill -9`, a notebook's restart, a scheduler, an out-of-memory daemon in user space",
                    "possible"),
        next=(how_to_resume(evidence), "if you did not: look for a message of the scheduler or platform at that time"),
        survivable=True,
    )  # fmt: skip


def _may_be_its_own(evidence: Evidence) -> bool:
    """Whether the kernel may have killed it for its CPU time, or it itself because its command had been killed."""
    if may_have_reached(evidence, number(mapping(evidence.death.get("cpu")).get("hard_limit"))):
        return True
    if is_relay(evidence) is None:
        return any(child.status.signal == SIGKILL for child in evidence.child_deaths)
    return is_relay(evidence) is True


SIGINT = 2


def judge_interrupted(evidence: Evidence) -> Cause | None:
    """`interrupted`: Ctrl-C, or the notebook's stop button.

    Certain from the status or the KeyboardInterrupt that nobody caught.
    """
    signal = evidence.status.signal
    is_note = str(evidence.exception.get("type", "")).endswith(".KeyboardInterrupt")
    readings: list[Reading] = []
    if signal == SIGINT:
        grade = "certain"
        readings.append(status_reading(evidence))
        if is_note and evidence.speaker:
            readings.append(Reading("KeyboardInterrupt", evidence.speaker.source))
    elif (found := raised_as(evidence, "interrupted")) is not None:
        grade = found.grade
        readings += found.evidence
    elif evidence.status.exit_code == 130 and (seen := recent_signal(evidence, "SIGINT", 30.0)):
        grade = "likely"
        readings += [seen.reading, status_reading(evidence)]
    else:
        return None
    return Cause(
        id="interrupted",
        claim=Claim("It was interrupted: Ctrl-C or the Stop button (SIGINT)", grade, tuple(readings)),  # type: ignore[arg-type]
        actor=signal_sender(evidence, "SIGINT"),
        next=("start it again when you are ready; nothing went wrong",),
    )


SIGHUP = 1


def judge_hangup(evidence: Evidence) -> Cause | None:
    """`hangup`: its terminal or connection was closed.

    Certain from the status; from its own dump of stacks when no status could be read, likely.
    """
    seen = recent_signal(evidence, "SIGHUP", 10.0)
    if evidence.status.signal == SIGHUP:
        grade, readings = "certain", [status_reading(evidence)]
    elif seen and not evidence.status.known and not (evidence.speaker and evidence.speaker.note):
        grade, readings = "likely", []
    else:
        return None
    if seen:
        readings.append(seen.reading)
    words = "jupyter lab" if evidence.is_kernel else printable_command(evidence)
    return Cause(
        id="hangup",
        claim=Claim("Its terminal or connection was closed (SIGHUP)", grade, tuple(readings)),  # type: ignore[arg-type]
        actor=signal_sender(evidence, "SIGHUP"),
        next=(
            f"start it so that it outlives the terminal: `nohup {words} &`, or inside `tmux`",
            how_to_resume(evidence),
        ),
        survivable=False,
    )


def printable_command(evidence: Evidence) -> str:
    """The command to paste, under `buoy run`."""
    return f"buoy run -- {printable(evidence.command, 70)}"


WORDS = {
    11: "a bad memory access in native code (SIGSEGV)",
    6: "native code aborted (SIGABRT: a failed assertion, a C++ exception, damaged memory)",
    8: "an impossible calculation in native code (SIGFPE: integer division by zero)",
    4: "an instruction this CPU does not have (SIGILL): often a package built for a newer CPU",
    5: "a trap in native code (SIGTRAP)",
}
SIGABRT = 6
_SI_TKILL = -6


def judge_native_crash(evidence: Evidence) -> Cause | None:
    """`native-crash`: code outside Python crashed: a bad pointer, a failed assertion, a stack overflow.

    Certain when the kernel said, to the process or in its log, that it raised the signal; one sent looks alike.
    """
    signal = evidence.status.signal
    speaker = evidence.speaker
    fault = speaker.fault.text if speaker else ""
    if not evidence.status.known:
        signal = last_word(speaker)
    if signal not in WORDS or (speaker and speaker.sent_by(signal) is not None) or evidence.crashed_at_exit:
        return None
    readings = [*end_readings(evidence)]
    grade: Grade = "likely"
    logged, told = _logged(evidence), _told(speaker, signal)
    proof = logged or told
    if proof is not None:
        # What it was told it may have survived, where nobody knows what ended it.
        grade = "certain" if logged or evidence.status.known else "likely"
        readings.insert(0, proof)
    readings += stack_reading(speaker)
    words = WORDS[signal]
    if is_recursion(fault):
        words = f"the stack ran over ({signal_name(signal)}): a function calls itself without end"
    when = ", while the interpreter was shutting down" if speaker and speaker.left_in_order else ""
    doubt = None
    if proof is None:
        doubt = Claim(
            f"the code itself; a {signal_name(signal)} sent with `kill` would look the same", "likely"
        )
    return Cause("native-crash", Claim(f"It crashed{when}: {words}", grade, tuple(readings)), doubt, (),
                 advice(evidence, speaker, signal), survivable=True)  # fmt: skip


def stack_reading(speaker: ProcessNotes | None) -> list[Reading]:
    """Where a process crashed, by its own last word."""
    if speaker is None or not speaker.fault.text:
        return []
    fault = speaker.fault.text
    place = user_frame(fault) or next(iter(last_stack(fault)), None)
    words = (headline(fault) or "stack written at the crash") + (f", at {place}" if place else "")
    return [Reading(printable(words, 160), f"process-{speaker.pid}/fault.txt", speaker.fault.wall)]


def last_word(speaker: ProcessNotes | None) -> int | None:
    """The fatal signal that a process of unknown status wrote of, or was told of, last."""
    if speaker is None:
        return None
    return signal_of(headline(speaker.fault.text) or "") or (speaker.fatal.number if speaker.fatal else None)


def _told(speaker: ProcessNotes | None, signal: int) -> Reading | None:
    """The kernel's own word to the process: that it raised the signal itself, or that the process did, by `abort`."""
    fatal = speaker.fatal if speaker else None
    if speaker is None or fatal is None or fatal.number != signal:
        return None
    if speaker.raised_by_kernel(signal):
        at = f" at address {fatal.address:#x}" if signal == 11 and fatal.code in (1, 2) else ""
        return Reading(f"the kernel raised it{at} (si_code {fatal.code}): it was not sent", speaker.source)
    if signal == SIGABRT and fatal.code == _SI_TKILL and fatal.pid == speaker.pid:
        return Reading("the process raised it itself (`abort`)", speaker.source)
    return None


def _logged(evidence: Evidence) -> Reading | None:
    if evidence.attempt.get("initial_pid_namespace") is not True:
        return None
    for line in evidence.own_death.lines:
        found = parse_segfault(str(line["text"]))
        if found and found.get("pid") == evidence.pid:
            return Reading(printable(str(line["text"]), 160), "kernel log")
    return None


def advice(evidence: Evidence, speaker: ProcessNotes | None, signal: int) -> tuple[str, ...]:
    """What to do about a crash, with the last words of the process that crashed."""
    steps = []
    if speaker and is_recursion(speaker.fault.text):
        steps.append(
            "end the recursion that the stack shows; raising `sys.setrecursionlimit` only moves the crash"
        )
    elif signal == 4:
        steps.append("reinstall the package named in the stack for this CPU, or take an older build of it")
    elif signal == 6:
        steps.append("read the last lines on stderr: native code says there why it aborted")
    if speaker and speaker.fault.text:
        path = f"{evidence.folder}/process-{speaker.pid}/fault.txt"
        steps.append(f"see which call crashed: `cat {typed(path)}`")
    else:
        steps.append(
            "the stack is on stderr if your script enabled faulthandler; else run it with `python -X faulthandler`"
        )
    steps.append(how_to_resume(evidence))
    return tuple(steps)


_WORDS = {
    "SIGQUIT": ("Ctrl-\\ was pressed, or another process sent it", "start it again when you are ready"),
    "SIGALRM": (
        "its own timer expired (`signal.alarm`) and it had no handler",
        "handle SIGALRM or drop the alarm",
    ),
    "SIGPIPE": (
        "it wrote to a pipe whose reader had gone",
        "all is well if `head` or a pager had seen enough; else write to a file instead",
    ),
    "SIGUSR1": (
        "SLURM and other schedulers send it before the time is over",
        "install a handler that saves, or drop `sbatch --signal`",
    ),
    "SIGUSR2": (
        "a tool sent it and no handler was there",
        "find out which tool uses it, or install a handler",
    ),
    "SIGXCPU": (
        "sent by hand, or a CPU limit that was not recorded",
        "`ulimit -t` shows whether there is a limit",
    ),
    "SIGSYS": ("a forbidden system call: the sandbox does not allow it", "run it outside that sandbox"),
}


def judge_other_signal(evidence: Evidence) -> Cause | None:
    """`other-signal`: SIGQUIT, SIGUSR1, SIGALRM, SIGPIPE or a real-time signal.

    Certain which signal it was; who sent it is not recorded.
    """
    signal = evidence.status.signal
    if signal is None:
        return _by_dump(evidence) or _by_sender(evidence) if not evidence.status.known else None
    if signal in (9, 15):
        return None
    name = signal_name(signal)
    seen = recent_signal(evidence, name, 5.0)
    readings = (status_reading(evidence), *((seen.reading,) if seen else ()))
    return _other_signal_cause(
        evidence, name, Claim(f"It was ended by {evidence.status}", "certain", readings)
    )


def _by_dump(evidence: Evidence) -> Cause | None:
    """Without a status: the stacks written when the signal came."""
    if evidence.speaker is None or evidence.speaker.note:
        return None
    for name in ("SIGQUIT", "SIGXCPU"):
        seen = recent_signal(evidence, name, 5.0)
        if seen:
            return _other_signal_cause(
                evidence, name, Claim(f"It was ended by {name}", "likely", (seen.reading,))
            )
    return None


def _by_sender(evidence: Evidence) -> Cause | None:
    """Without a status: what the kernel said to the process when the signal came."""
    speaker = evidence.speaker
    if speaker is None or speaker.note or speaker.sent_by(last_word(speaker)) is None:
        return None
    assert speaker.fatal is not None
    name = signal_name(speaker.fatal.number)
    return _other_signal_cause(evidence, name, Claim(f"It was ended by {name}", "likely"))


def _sender(evidence: Evidence) -> Claim | None:
    """Who sent a signal of those that crashes raise, by the kernel's own word to the process."""
    speaker = evidence.speaker
    number = speaker.fatal.number if speaker and speaker.fatal else None
    pid = speaker.sent_by(number) if speaker and evidence.status.signal in (None, number) else None
    if speaker is None or pid is None:
        return None
    who = f"pid {pid}" if pid else "a process outside of its container"
    reading = Reading(f"sent with `kill` by {who}: not a crash", speaker.source)
    return Claim(f"sent by {who}; it did not crash by itself", "certain", (reading,))


def _other_signal_cause(evidence: Evidence, name: str, claim: Claim) -> Cause:
    why, step = _WORDS.get(
        name, ("who sent it is not recorded", f"find out which program sends {name}, or install a handler")
    )
    actor = signal_sender(evidence, name) or _sender(evidence) or Claim(why, "possible")
    return Cause("other-signal", claim, actor, (), (step, how_to_resume(evidence)))


SIGBUS = 7


def is_bus_error(evidence: Evidence) -> bool:
    """Whether it died of SIGBUS, by its status or by its own last word."""
    speaker = evidence.speaker
    if speaker and speaker.sent_by(SIGBUS) is not None:
        return False
    if evidence.status.known:
        return evidence.status.signal == SIGBUS
    return bool(speaker and signal_of(headline(speaker.fault.text) or "") == SIGBUS)


def readings(evidence: Evidence) -> tuple[Reading, ...]:
    """The status and the place."""
    found = [*end_readings(evidence)]
    speaker = evidence.speaker
    if speaker and speaker.fault.text:
        place = user_frame(speaker.fault.text)
        words = headline(speaker.fault.text) or "Bus error"
        source = f"process-{speaker.pid}/fault.txt"
        found.append(Reading(f"{words}{f', at {place}' if place else ''}", source, speaker.fault.wall))
    return tuple(found)


def judge_bus_error(evidence: Evidence) -> Cause | None:
    """`bus-error`: a mapped file has no page behind an address: it was cut short, or its disk is full.

    Likely: full file systems have their own judges; what is left is a mapped file that changed.
    """
    if not is_bus_error(evidence):
        return None
    return Cause(
        id="bus-error",
        claim=Claim("It accessed a memory-mapped file where it has no data (SIGBUS)", "likely", readings(evidence)),
        actor=Claim("a file that was shortened while mapped, failing storage, or a SIGBUS sent with `kill`",
                    "possible"),
        next=("do not rewrite data files in place while they are memory-mapped (write a new file, then rename)",
              "if the file lies on a mounted drive, copy it to the local disk first", how_to_resume(evidence)),
        survivable=True,
    )  # fmt: skip
