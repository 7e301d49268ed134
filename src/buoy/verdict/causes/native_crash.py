"""Code outside Python crashed: a bad pointer, a failed assertion, a division by zero, a stack overflow."""

from __future__ import annotations

from buoy.machine.kernel_log import parse_segfault
from buoy.verdict.causes.common import status_reading
from buoy.verdict.evidence import Evidence, ProcessNotes
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.status import signal_name
from buoy.verdict.traces import headline, is_recursion, last_stack, signal_of, user_frame
from buoy.verdict.values import printable, typed

WORDS = {
    11: "a bad memory access in native code (SIGSEGV)",
    6: "native code gave up (SIGABRT: a failed assertion, a C++ exception, damaged memory)",
    8: "an impossible calculation in native code (SIGFPE: integer division by zero)",
    4: "an instruction this CPU does not have (SIGILL): often a package built for a newer CPU",
    5: "a trap in native code (SIGTRAP)",
}


def judge(evidence: Evidence) -> Cause | None:
    """Likely: a signal sent with kill leaves the same traces. Certain only when the kernel logged the fault itself."""
    signal = evidence.status.signal
    speaker = evidence.speaker
    fault = speaker.fault.text if speaker else ""
    if not evidence.status.known:
        signal = signal_of(headline(fault) or "")
    if signal not in WORDS:
        return None
    readings = [status_reading(evidence)] if evidence.status.known else []
    grade: Grade = "likely"
    logged = _logged(evidence)
    if logged:
        grade = "certain"
        readings.insert(0, Reading(logged, "kernel log"))
    readings += stack_reading(speaker)
    words = WORDS[signal]
    if is_recursion(fault):
        words = f"the stack ran over ({signal_name(signal)}): a function calls itself without end"
    when = ", while the interpreter was shutting down" if speaker and speaker.left_in_order else ""
    doubt = None
    if grade != "certain":
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


def _logged(evidence: Evidence) -> str | None:
    if evidence.attempt.get("initial_pid_namespace") is not True:
        return None
    for line in evidence.own_death.lines:
        found = parse_segfault(str(line["text"]))
        if found and found.get("pid") == evidence.pid:
            return printable(str(line["text"]), 160)
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
        steps.append("read the last lines on stderr: native code says there why it gave up")
    if speaker and speaker.fault.text:
        path = f"{evidence.folder}/process-{speaker.pid}/fault.txt"
        steps.append(f"see which call crashed: `cat {typed(path)}`")
    else:
        steps.append(
            "the stack is on stderr if your script enabled faulthandler; else run it with `python -X faulthandler`"
        )
    steps.append(go_on(evidence))
    return tuple(steps)
