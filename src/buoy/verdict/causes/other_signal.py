"""A signal that neither crashes nor belongs to a limit: SIGQUIT, SIGUSR1, SIGALRM, SIGPIPE, real-time ones."""

from __future__ import annotations

from buoy.verdict.causes.common import recent_signal, signal_sender, status_reading
from buoy.verdict.causes.native_crash import last_word
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.status import signal_name

_WORDS = {
    "SIGQUIT": ("somebody pressed Ctrl-\\ or sent it", "start it again when you are ready"),
    "SIGALRM": (
        "a timer of its own ran out (`signal.alarm`) and no handler was there",
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


def judge(evidence: Evidence) -> Cause | None:
    """Certain which signal it was; who sent it is not recorded."""
    signal = evidence.status.signal
    if signal is None:
        return _by_dump(evidence) or _by_sender(evidence) if not evidence.status.known else None
    if signal in (9, 15):
        return None
    name = signal_name(signal)
    seen = recent_signal(evidence, name, 5.0)
    readings = (status_reading(evidence), *((seen.reading,) if seen else ()))
    return _cause(evidence, name, Claim(f"It was ended by {evidence.status}", "certain", readings))


def _by_dump(evidence: Evidence) -> Cause | None:
    """Without a status: the stacks written when the signal came."""
    if evidence.speaker is None or evidence.speaker.note:
        return None
    for name in ("SIGQUIT", "SIGXCPU"):
        seen = recent_signal(evidence, name, 5.0)
        if seen:
            return _cause(evidence, name, Claim(f"It was ended by {name}", "likely", (seen.reading,)))
    return None


def _by_sender(evidence: Evidence) -> Cause | None:
    """Without a status: what the kernel said to the process when the signal came."""
    speaker = evidence.speaker
    if speaker is None or speaker.note or speaker.sent_by(last_word(speaker)) is None:
        return None
    assert speaker.fatal is not None
    name = signal_name(speaker.fatal.number)
    return _cause(evidence, name, Claim(f"It was ended by {name}", "likely"))


def _sender(evidence: Evidence) -> Claim | None:
    """Who sent a signal of those that crashes raise, by the kernel's own word to the process."""
    speaker = evidence.speaker
    number = speaker.fatal.number if speaker and speaker.fatal else None
    pid = speaker.sent_by(number) if speaker and evidence.status.signal in (None, number) else None
    if speaker is None or pid is None:
        return None
    who = f"pid {pid}" if pid else "a process outside of its container"
    reading = Reading(f"sent with `kill` by {who}: no crash of its own", speaker.source)
    return Claim(f"sent by {who}; it did not crash by itself", "certain", (reading,))


def _cause(evidence: Evidence, name: str, claim: Claim) -> Cause:
    why, step = _WORDS.get(
        name, ("who sent it is not recorded", f"find out which program sends {name}, or install a handler")
    )
    actor = signal_sender(evidence, name) or _sender(evidence) or Claim(why, "possible")
    return Cause("other-signal", claim, actor, (), (step, go_on(evidence)))
