"""It ended by its own decision, with a code that says something went wrong."""

from __future__ import annotations

import os

from buoy.verdict.causes.common import status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.status import signal_name
from buoy.verdict.values import printable

_SHELLS = (
    "sh",
    "bash",
    "dash",
    "zsh",
    "ksh",
    "fish",
    "busybox",
    "env",
    "xargs",
    "make",
    "srun",
    "timeout",
    "stdbuf",
    "time",
)


def judge(evidence: Evidence) -> Cause | None:
    """Certain with the status: an exit code is no signal, whatever its number. What a shell passes on is likely."""
    code = evidence.status.exit_code
    speaker = evidence.speaker
    if (
        code is None
        and not evidence.status.known
        and speaker
        and speaker.note
        and speaker.note.get("kind") == "exit"
    ):
        said = speaker.note.get("code")
        if isinstance(said, int) and 0 < said < 256:
            reading = Reading(f"it said it would leave with code {said}", speaker.source)
            return Cause(
                "exit-code",
                Claim(f"It ended itself with exit code {said}", "likely", (reading,)),
                next=_next(said),
            )
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
    elif code in (126, 127) and program in _SHELLS:
        grade = "likely"
        words = f"`{program}` could not {'run' if code == 126 else 'find'} a command (exit code {code})"
    return Cause(
        "exit-code", Claim(words, grade, (status_reading(evidence),)), next=_next(code, evidence.main is None)
    )


def _next(code: int, silent: bool = False) -> tuple[str, ...]:
    steps = ["read the last lines of its output: a program that leaves by itself says there why"]
    if code > 128:
        steps.append(
            "if a shell or launcher passes on a child's death, start the Python program itself under `buoy run`"
        )
    elif silent:
        steps.append(
            "it was not a Python that buoy could watch from inside (`-I`, `-S`, another program): no exception is known"
        )
    else:
        steps.append("look for `sys.exit`, `os._exit` or `exit` with this code")
    return tuple(steps)
