"""Code outside Python crashed: a bad pointer, a failed assertion, a division by zero, a stack overflow."""

from __future__ import annotations

from buoy.machine.kernel_log import parse_segfault
from buoy.text import printable, typed
from buoy.verdict.causes.common import status_reading
from buoy.verdict.evidence import Evidence, ProcessNotes
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.status import signal_name
from buoy.verdict.traces import headline, is_recursion, last_stack, signal_of, user_frame

WORDS = {
    11: "a bad memory access in native code (SIGSEGV)",
    6: "native code gave up (SIGABRT: a failed assertion, a C++ exception, damaged memory)",
    8: "an impossible calculation in native code (SIGFPE: integer division by zero)",
    4: "an instruction this CPU does not have (SIGILL): often a package built for a newer CPU",
    5: "a trap in native code (SIGTRAP)",
}
SIGABRT = 6
_SI_TKILL = -6


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the kernel said, to the process or in its log, that it raised the signal; one sent looks alike."""
    signal = evidence.status.signal
    speaker = evidence.speaker
    fault = speaker.fault.text if speaker else ""
    if not evidence.status.known:
        signal = last_word(speaker)
    if signal not in WORDS or (speaker and speaker.sent_by(signal) is not None) or evidence.crashed_at_exit:
        return None
    readings = [status_reading(evidence)] if evidence.status.known else []
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
