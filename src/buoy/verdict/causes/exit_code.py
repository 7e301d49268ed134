"""It ended by its own decision, with a code that says something went wrong."""

from __future__ import annotations

import os

from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.causes.common import (
    Raised,
    advice_about,
    died_before,
    left_in_a_cell,
    raised,
    status_reading,
    violent_deaths,
    was_notebook,
    weaker,
)
from buoy.verdict.evidence import Evidence, ProcessDeath
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.saved import last_save
from buoy.verdict.status import signal_name
from buoy.verdict.time_command import TimeCommand, time_command

_SHELLS = (
    "sh", "bash", "dash", "zsh", "ksh", "fish", "busybox", "env", "xargs", "make", "srun", "timeout", "stdbuf", "time",
)  # fmt: skip


def judge(evidence: Evidence) -> Cause | None:
    """Certain with the status: an exit code is no signal, whatever its number. What a shell passes on is likely."""
    code = evidence.status.exit_code
    if left_in_a_cell(evidence):
        return _in_a_cell(evidence)
    if not code:
        return None
    grade: Grade = "certain"
    words = f"It ended itself with exit code {code}"
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
        words = "`timeout` ended it: its time was over (exit code 124)"
        limit = time_command(evidence.attempt.get("command"))
        if limit is not None:
            words = f"`timeout {limit.word}` ended it: its time was over (exit code 124)"
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
    """How to go on, where something saves: a program that does not is no better off when it is started again."""
    saves = evidence.events_of("training") or evidence.events_of("opened") or last_save(evidence) is not None
    return (go_on(evidence),) if saves else ()


def _in_a_cell(evidence: Evidence) -> Cause:
    """Code 0 says that all went well; a cell that did not come to its end says that it did not."""
    assert evidence.main is not None
    busy = Reading("a cell ran, and the interpreter did not shut down in order", evidence.main.source)
    words = "It ended itself with exit code 0 in the middle of a cell"
    return Cause("exit-code", Claim(words, "certain", (status_reading(evidence), busy)), next=(
        go_on(evidence),
        "look in that cell for `os._exit(0)`, or for a library that ends the process",
    ))  # fmt: skip


def judge_child(evidence: Evidence) -> Cause | None:
    """A rank or worker ended itself with a code, and the exception of its parent only reports that."""
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
        f"read what {lost.who} itself printed last: a program that leaves by itself says there why",
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
    steps = ["read the last lines of its output: a program that leaves by itself says there why"]
    if code > 128 and evidence.main is None and not was_notebook(evidence):
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
