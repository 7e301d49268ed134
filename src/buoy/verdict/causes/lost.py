"""Nothing inside the process ended it: the machine, the notebook server above it, or its recorder went away."""

from __future__ import annotations

from buoy.fields import number, text
from buoy.text import printable
from buoy.units import format_duration, format_share
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes.common import end_readings
from buoy.verdict.evidence import Evidence, ParentDeath
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.oom import describe_limit, examine

_FRESH = 180.0
"""A record this young (seconds), read from another host or container, may still be growing there."""
_REBOOT = 20.0
"""No machine is back from a reboot sooner."""


def judge_machine_lost(evidence: Evidence) -> Cause | None:
    """`machine-lost`: the machine or container went away with everything on it.

    Certain that it is gone when this is the same host after another boot; on another host the first may yet live.
    """
    if evidence.death or evidence.exit or evidence.now.same_machine is not False:
        return None
    now = evidence.now
    age = now.wall - evidence.last_wall if evidence.last_wall is not None else None
    readings = [Reading("no death was recorded", "attempt folder", evidence.last_wall)]
    if now.same_boot is False:
        readings.append(
            Reading(
                f"boot id was {text(evidence.attempt.get('boot_id'))}, is a different one now", "attempt.json"
            )
        )
    if now.same_container is False and now.same_boot is not False:
        readings.append(Reading("process 1 is a different one than at the start", "attempt.json"))
    if now.same_host is False:
        host = text(evidence.attempt.get("hostname"))
        readings.append(Reading(f"it ran on host {host}, this is a different one", "attempt.json"))
    grade: Grade = "likely"
    if now.same_boot is False and now.same_host is not False:
        # Only two machines of one name that write into one folder could deceive us, and only while both live.
        grade = "certain" if age is None or age > _REBOOT else "likely"
    elif not now.sees_inside and age is not None and age < _FRESH:
        return None
    last = f"; last sign of life {format_duration(max(0.0, age))} ago" if age is not None else ""
    return Cause(
        id="machine-lost",
        claim=Claim(f"The machine or container it ran on is gone{last}", grade, tuple(readings)),
        actor=Claim(
            "the platform: lifetime or idle limit, preemption, or a crash of the machine", "possible"
        ),
        next=(
            how_to_resume(evidence),
            "keep a copy on a mounted drive: `buoy.Run(..., mirror=DIR)`"
            if evidence.is_kernel
            else "keep checkpoints on a mounted drive; `--mirror DIR` keeps the flight log there too",
        ),
        survivable=True,
    )


_POLL_SECONDS = 3.0
"""ipykernel looks for its parent once a second and leaves with code 1; a loaded machine takes its time."""


def judge_parent_lost(evidence: Evidence) -> Cause | None:
    """`parent-lost`: the server above a notebook's kernel went away, and the kernel ended itself.

    Likely: nothing but the order of the two ends tells it from an `os._exit(1)` of the same second.

    Possible when the order of the two, or the kernel's own code, is not known.
    """
    parent, main = evidence.parent_death, evidence.main
    age = evidence.parent_age
    if parent is None or age is None or age > _POLL_SECONDS:
        return None
    if not (parent.is_awaited or evidence.is_kernel):
        return None
    if evidence.status.known and evidence.status.exit_code != 1:
        return None
    if main is not None and main.left_in_order:  # `os._exit` runs nothing on its way out
        return None
    grade: Grade = "likely" if evidence.status.known and not parent.is_together else "possible"
    who = parent_name(parent)
    ended = Reading(f"{who} ended {_when(parent, age)}", "events.jsonl", parent.death.wall)
    return Cause(
        id="parent-lost",
        claim=Claim(
            f"Its notebook server, {who}, was gone: a kernel then exits with code 1",
            grade,
            (ended, *end_readings(evidence)),
        ),
        cascade=(parent_end(evidence, parent),),
        next=(
            "read the server's own last lines, or its container's: the kernel only ended with it",
            how_to_resume(evidence),
            "start the server so that it outlives the terminal: `nohup jupyter lab &`, or inside `tmux`",
        ),
        survivable=True,
    )


def parent_name(parent: ParentDeath) -> str:
    """The parent for users."""
    return f"`{printable(parent.death.name, 40)}` (pid {parent.death.pid})"


def parent_end(evidence: Evidence, parent: ParentDeath) -> Claim:
    """How the parent ended, as far as that was seen."""
    who, death = parent_name(parent), parent.death
    reading = Reading(f"{who}: {death.status}", death.source, death.wall)
    oom = examine(evidence, death) if death.status.signal == 9 else None
    if oom is not None and oom.answer == "oom":
        return Claim(f"{who} was killed by the kernel's OOM killer", oom.grade, (*oom.evidence, reading))
    if death.status.known:
        return Claim(f"{who} ended with {death.status}", "certain", (reading,))
    return Claim(f"{who} ended; how was not seen", "certain", (reading,))


def _when(parent: ParentDeath, age: float) -> str:
    if parent.is_together:
        return "in the same moment"
    return f"{age:.2g} s before it"


_TOGETHER = 3.0
"""Seconds. The recorder takes several readings in one; a busy machine lets it miss some."""


def judge_recorder_lost(evidence: Evidence) -> Cause | None:
    """`recorder-lost`: the process is gone, and the recorder with it.

    Certain that it is gone; why is unknown, and a high reading is only a possibility.
    """
    if evidence.death or evidence.now.same_machine is False or not evidence.attempt or evidence.never_started:
        return None
    by = " with signal 9" if evidence.status.signal == 9 else ""
    gone = Reading("no death record, though this is the same boot", "attempt folder", evidence.last_wall)
    silence = _seconds_unrecorded(evidence)
    is_together = silence is not None and abs(silence) <= _TOGETHER
    limit, used = describe_limit(evidence)
    actor = None
    if limit and used:
        share = Reading(f"memory last seen: {format_share(used, limit)}", "samples", evidence.last_wall)
        if used > 0.85 * limit:
            both = "both" if is_together else "it"
            actor = Claim(f"memory was nearly full: the kernel may have killed {both}", "possible", (share,))
    steps = [how_to_resume(evidence)]
    if is_together:
        steps.append(
            "both died together, as when a container or session ends: look for the platform's message"
        )
    return Cause(
        id="recorder-lost",
        claim=Claim(
            f"It is gone{by}, and no recorder saw its end: the cause is unknown",
            "certain",
            (gone, *end_readings(evidence)),
        ),
        actor=actor,
        cascade=_when_the_recorder_stopped(silence),
        next=tuple(steps),
        survivable=True,
    )


def _seconds_unrecorded(evidence: Evidence) -> float | None:
    """From the recorder's last reading to the end, or to the last step where the end has no time; None: not known."""
    last = number(evidence.last_sample.get("t"))
    end = evidence.died_t
    if end is None and evidence.main is not None:
        end = evidence.main.step_t
    return end - last if end is not None and last is not None else None


def _when_the_recorder_stopped(silence: float | None) -> tuple[Claim, ...]:
    if silence is None or silence < -_TOGETHER:
        return ()  # no step came for long before either stopped: which of them was first is not known
    if silence <= _TOGETHER:
        return (Claim("the recorder stopped at the same time, within seconds", "likely"),)
    # A recorder whose disk is full writes nothing either, so its own end is not certain.
    words = f"nothing was recorded in its last {format_duration(silence)}: the recorder had stopped before it"
    return (Claim(words, "likely"),)
