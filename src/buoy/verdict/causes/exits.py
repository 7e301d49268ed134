"""The process ended by itself: in order, with an exit code, or with an exception; or nothing shows how it ended."""

from __future__ import annotations

import os

from buoy.fields import count, mapping, text
from buoy.machine.files import read_json
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.advice import how_to_resume, last_save
from buoy.verdict.causes.common import (
    Raised,
    advice_about,
    died_before,
    end_readings,
    left_in_a_cell,
    raised,
    status_reading,
    violent_deaths,
    weaker,
)
from buoy.verdict.evidence import Evidence, ProcessDeath
from buoy.verdict.exceptions import broken_line, is_failed_write, is_in_a_worker
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import examine
from buoy.verdict.status import TimeCommand, signal_name, time_command


def judge_clean_exit(evidence: Evidence) -> Cause | None:
    """`clean-exit`: it ended well.

    Certain with exit code 0. Without a code: likely if the script came to its last line, else only possible.
    """
    if left_in_a_cell(evidence):
        return None
    speaker = evidence.speaker
    if evidence.status.exit_code == 0:
        readings = [status_reading(evidence)]
        if speaker and speaker.left_in_order:
            readings.append(Reading("the interpreter shut down cleanly", speaker.source))
        return Cause(
            "clean-exit",
            Claim("It ended with exit code 0", "certain", tuple(readings)),
            None,
            _left(evidence),
        )
    if evidence.status.known or speaker is None or not speaker.note or speaker.note.get("kind") != "exit":
        return None
    reading = Reading("the interpreter shut down cleanly; the exit code was not read", speaker.source)
    return Cause("clean-exit", _without_a_code(speaker.note.get("finished"), reading), None, _left(evidence))


def _without_a_code(finished: object, reading: Reading) -> Claim:
    """`sys.exit(3)` shuts the interpreter down in order too; only a script that came to its end surely ended well."""
    if finished is True:
        last = Reading("the script came to its last line", reading.source)
        return Claim("It ended normally, at the end of the script", "likely", (last, reading))
    how = (
        "by `sys.exit` or the like, before the end of the script"
        if finished is False
        else "with a clean shutdown"
    )
    return Claim(
        f"It ended by itself, {how}; its exit code was not read, so it may have failed",
        "possible",
        (reading,),
    )


def _left(evidence: Evidence) -> tuple[Claim, ...]:
    """Descendants that run on, as after a fork that became a daemon."""
    pids = evidence.death.get("alive")
    alive = [pid for pid in pids if isinstance(pid, int)] if isinstance(pids, list) else []
    if not alive:
        return ()
    names = ", ".join(map(str, alive[:5]))
    reading = Reading(f"still running at the end: pid {names}", "death.json", evidence.died_wall)
    return (Claim(f"{len(alive)} process(es) it had started kept running without it", "certain", (reading,)),)


_SHELLS = (
    "sh", "bash", "dash", "zsh", "ksh", "fish", "busybox", "env", "xargs", "make", "srun", "timeout", "stdbuf", "time",
)  # fmt: skip


def judge_exit_code(evidence: Evidence) -> Cause | None:
    """`exit-code`: it ended itself with a code that says something went wrong.

    Certain with the status: an exit code is no signal, whatever its number. What a shell passes on is likely.
    """
    code = evidence.status.exit_code
    if left_in_a_cell(evidence):
        return _in_a_cell(evidence)
    if not code:
        return None
    grade: Grade = "certain"
    words = f"It ended with exit code {code}"
    program = os.path.basename(evidence.command.split(" ", 1)[0])
    if 128 < code < 128 + 65:
        name = signal_name(code - 128)
        if program in _SHELLS and evidence.main is None:
            grade = "likely"
            words = (
                f"`{printable(program, 30)}` ended with code {code}, as after a command that died of {name}"
            )
        else:
            words += f"; no signal killed it, though {code} is what a shell shows after {name}"
    elif code == 124 and program == "timeout":
        grade = "likely"
        words = "`timeout` ended it: its time was up (exit code 124)"
        limit = time_command(evidence.attempt.get("command"))
        if limit is not None:
            words = f"`timeout {limit.word}` ended it: its time was up (exit code 124)"
        return Cause(
            "exit-code", Claim(words, grade, (status_reading(evidence),)), next=after_timeout(evidence, limit)
        )
    elif code in (126, 127) and program in _SHELLS:
        grade = "likely"
        words = f"`{program}` could not {'run' if code == 126 else 'find'} a command (exit code {code})"
    return Cause(
        "exit-code",
        Claim(words, grade, (status_reading(evidence),)),
        next=_next(evidence, code, evidence.main is None and not evidence.processes),
    )


def timeout_that_killed(evidence: Evidence) -> TimeCommand | None:
    """The `timeout` around the command, if it sends SIGKILL and its time was over."""
    timer = time_command(evidence.attempt.get("command"))
    return timer if timer is not None and timer.kills and (evidence.ran_for or 0.0) >= timer.seconds else None


def after_timeout(evidence: Evidence, limit: TimeCommand | None) -> tuple[str, ...]:
    """What to do about a time that `timeout` had set."""
    time = f" than {format_duration(limit.seconds)}" if limit else " time"
    word = f"{limit.seconds:g}s" if limit else "12h"
    return (
        f"give `timeout` more{time}, or leave it out",
        f"to save before the time is over, let buoy know of it: `buoy run --time-limit {word} -- ...`, "
        f'or `buoy.Run(time_limit="{word}")`',
        *_from_its_checkpoint(evidence),
    )


def _from_its_checkpoint(evidence: Evidence) -> tuple[str, ...]:
    """How to resume, where something saves: a program that does not is no better off when it is started again."""
    saves = evidence.events_of("training") or evidence.events_of("opened") or last_save(evidence) is not None
    return (how_to_resume(evidence),) if saves else ()


def _in_a_cell(evidence: Evidence) -> Cause:
    """Code 0 says that all went well; a cell that did not come to its end says that it did not."""
    assert evidence.main is not None
    busy = Reading("a cell ran, and the interpreter did not shut down cleanly", evidence.main.source)
    words = "It ended with exit code 0 in the middle of a cell"
    return Cause("exit-code", Claim(words, "certain", (status_reading(evidence), busy)), next=(
        how_to_resume(evidence),
        "look in that cell for `os._exit(0)`, or for a library that ends the process",
    ))  # fmt: skip


def judge_child(evidence: Evidence) -> Cause | None:
    """`exit-code`, of a child process.

    A rank or worker ended itself with a code, and the exception of its parent only reports that.
    """
    ended = raised(evidence)
    if ended is None or ended.lost is None or ended.lost.status.signal is not None:
        return None
    lost = ended.lost
    recorded = _recorded_child(evidence, ended)
    status = recorded.status if recorded is not None else lost.status
    if not status.exit_code:
        return None
    pid = lost.pids[0] if lost.pids else recorded.pid if recorded is not None else None
    grade: Grade = ended.grade
    if not (lost.exact or (recorded is not None and lost.pids)) or status.exit_code > 128:
        grade = weaker(grade, "likely")
    source = recorded.source if recorded is not None else ended.evidence[0].source
    who = f"{lost.who} (pid {pid})" if pid else lost.who
    words = f"{who[0].upper()}{who[1:]} ended itself with {status}; its parent stopped because of it"
    readings = (Reading(f"{who}: {status}", source, recorded.wall if recorded else None), *ended.evidence)
    return Cause("exit-code", Claim(words, grade, readings), next=(
        f"read what {lost.who} itself printed last: a program that exits by itself usually says why there",
        "look for `sys.exit`, `os._exit` or `exit` with this code",
    ))  # fmt: skip


def _recorded_child(evidence: Evidence, ended: Raised) -> ProcessDeath | None:
    """The lost child as the recorder saw it: by its pid, else the last that left with a code just before."""
    named = ended.lost.pids if ended.lost else ()
    left = [child for child in reversed(evidence.child_deaths) if child.status.exit_code]
    if named:
        return next((child for child in left if child.pid in named), None)
    return next((child for child in left if died_before(evidence, child, 10.0) is not None), None)


def _next(evidence: Evidence, code: int, silent: bool = False) -> tuple[str, ...]:
    steps = ["read the last lines of its output: a program that exits by itself usually says why there"]
    if code > 128 and evidence.main is None and not evidence.is_kernel:
        steps.append(
            "if a shell or launcher passes on a child's death, start the Python program itself under `buoy run`"
        )
    elif silent:
        steps.append(
            "it was not a Python that buoy could watch from inside (`-I`, `-S`, another program): no exception is known"
        )
    else:
        steps.append("look for `sys.exit`, `os._exit` or `exit` with this code")
    return (*advice_about(violent_deaths(evidence)), *steps, *_from_its_checkpoint(evidence))


_HINTS = {
    "ModuleNotFoundError": "`pip install` the missing module, in the same environment that runs the script",
    "ImportError": "the module is there but does not offer that name: check its version",
    "SyntaxError": "fix the line; `python -m py_compile FILE` checks it without running",
    "RecursionError": "end the recursion; raising `sys.setrecursionlimit` risks a crash instead",
    "FileNotFoundError": "check the path and the working directory",
    "BrokenPipeError": "the reader of its output was gone (`| head`, a pager that was closed, a "
    "connection that ended): write to a file instead, or let the reader read to the end",
    "CalledProcessError": "the command that it ran failed: read that command's own last lines",
    "PermissionError": "check the owner and mode of that file, or write elsewhere",
    "KeyError": "print the available keys just before that line",
    "AssertionError": "the condition in that line did not hold: print both sides before it",
}


def judge_python_exception(evidence: Evidence) -> Cause | None:
    """`python-exception`: an exception that nobody caught. Certain: its own last words and exit code 1."""
    found = raised(evidence)
    if found is None or found.finding.id == "terminated":
        return None
    name = found.finding.type.rpartition(".")[2]
    place = mapping(evidence.exception.get("where"))
    where = ""
    if text(place.get("file")):
        where = f" at {printable(str(place['file']), 70)}:{count(place.get('line')) or '?'}"
    cascade = [*found.cascade]
    for child in evidence.child_deaths:
        if child.status.exit_code and died_before(evidence, child, 10.0) is not None:
            reading = Reading(str(child.status), child.source, child.wall)
            who = printable(child.name, 50)
            cascade.append(Claim(f"{who} (pid {child.pid}) had ended: {child.status}", "certain", (reading,)))
    violent, grade = violent_deaths(evidence), found.grade
    line = broken_line(evidence.exception)
    if line == "to a child" or (line and violent):  # what broke it is not known, and not the line that raised
        grade = weaker(grade, "likely")
    hint = _HINTS.get(name, "fix that line; the traceback on stderr shows how it got there")
    if name == "FileNotFoundError" and str(evidence.attempt.get("platform")).startswith("colab"):
        hint += "; a new session starts with an empty `/content`"
    if is_in_a_worker(found.finding):
        hint = "run once with `num_workers=0`: the worker's own error then shows where it happens"
    if line == "to a child":
        hint = "the process at the other end of that pipe was gone, or silent: look for what it printed last"
    if is_failed_write(found.finding.message):
        hint = (
            "`torch.save` could not write all of it, and does not say why: see with `df -h` whether the disk that it "
            "writes to is full; if not, fix that line"
        )
    return Cause(
        id="python-exception",
        claim=Claim(f"Uncaught exception: {printable(found.finding.short, 130)}", grade,
                    (Reading(f"raised{where}", found.evidence[0].source), *found.evidence[1:])),
        cascade=tuple(cascade[:3]),
        next=(*advice_about(violent), hint),
    )  # fmt: skip


def judge_damaged(evidence: Evidence) -> Cause | None:
    """A death whose record can no longer be read: likely what was judged while it was whole."""
    if not evidence.is_death_damaged or not evidence.is_dead:
        return None
    damage = Reading("the death record is damaged", "death.json")
    cause = mapping((read_json(os.path.join(evidence.folder, "verdict.json")) or {}).get("cause"))
    kind, words = text(cause.get("id")), text(mapping(cause.get("claim")).get("text"))
    if kind is None or words is None:
        readings = (damage, *end_readings(evidence))
        claim = Claim("Unknown: it ended, and the death record is damaged", "possible", readings)
        return Cause("unknown", claim, next=(how_to_resume(evidence),), survivable=True)
    then = Reading("so it was judged while the record was whole", "verdict.json")
    return Cause(kind, Claim(words, "likely", (damage, then)), next=(how_to_resume(evidence),))


def judge_unknown(evidence: Evidence) -> Cause:
    """`unknown`: it is unknown, and this says what was missing. Always an answer, never more than possible."""
    if not evidence.attempt and not evidence.death and not evidence.exit:
        claim = Claim("Unknown: this folder holds no record of an attempt", "possible")
        return Cause("unknown", claim, next=("check the path: `buoy why RUN` wants a run folder",))
    if evidence.never_started and evidence.now.same_machine is not False:
        words = "Unknown: it never started, or ended before anything was recorded"
        return Cause("unknown", Claim(words, "possible"), next=(
            "start it again, recorded as before", "`buoy why RUN --attempt N` shows an earlier attempt",
        ))  # fmt: skip
    if not evidence.death and not evidence.exit:
        words = "Unknown: it was recorded on another machine, and may still be running there"
        return Cause("unknown", Claim(words, "possible"), next=("ask on the machine where it runs",))
    readings = [*end_readings(evidence)]
    oom = examine(evidence, evidence.own_death) if evidence.death else None
    if evidence.status.signal == 9:
        words = (
            f"Unknown who sent SIGKILL: {oom.reason if oom else 'the counters were not read at its death'}"
        )
    else:
        words = "Unknown: its exit status could not be read, and it left no exception or stacks"
        if oom and oom.answer == "not-oom":
            words += "; it was not the kernel's OOM killer"
    readings += list(oom.evidence) if oom else []
    return Cause(
        "unknown",
        Claim(words, "possible", tuple(readings)),
        None,
        (),
        _advice_without_record(evidence),
        survivable=True,
    )


def _advice_without_record(evidence: Evidence) -> tuple[str, ...]:
    if evidence.status.known or evidence.is_kernel:
        return (how_to_resume(evidence),)
    return (
        "start it with `buoy run -- COMMAND`: the parent process always learns the exact status",
        how_to_resume(evidence),
    )
