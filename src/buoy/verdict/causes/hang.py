"""It lives, but has not taken a step for far longer than its steps take."""

from __future__ import annotations

from buoy.flight.stall import is_busy, is_stopped
from buoy.units import format_duration
from buoy.verdict.causes.common import how_to_continue, standing_hang, step_of, was_notebook
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.traces import last_stack, user_frame
from buoy.verdict.values import mappings, number, printable, text, typed

# Innermost functions that wait, and what for.
_WAITS = {
    "acquire": "waiting for a lock",
    "wait": "waiting for another thread or process", "join": "waiting for another thread or process",
    "recv": "waiting for data from a socket or pipe", "recv_into": "waiting for data from a socket or pipe",
    "select": "waiting for data from a socket or pipe", "accept": "waiting for a connection",
    "_recv": "waiting for data from another process", "poll": "waiting for data from another process",
    "get": "waiting on a queue", "read": "waiting for a read", "readline": "waiting for input",
    "sleep": "sleeping", "communicate": "waiting for a subprocess",
    "all_reduce": "waiting for another rank", "barrier": "waiting for another rank",
}  # fmt: skip


def judge(evidence: Evidence) -> Cause | None:
    """Certain that it hangs when it does nothing; one that computes may as well be at a long evaluation.

    What it waits for is read from the stacks and only likely.
    """
    event = standing_hang(evidence)
    if event is None or evidence.is_dead:
        return None
    age = number(event.get("age"))
    share = number(event.get("cpu_share"))
    since = f"no step since {step_of(event)}"
    wall = number(event.get("wall"))
    read = Reading(f"{since}, for {format_duration(age)} when noticed", "events.jsonl", wall)
    readings = [read]
    if share is not None:
        readings.append(Reading(f"it used {100 * share:.0f} % of one core meanwhile", "events.jsonl", wall))
    busy = is_busy(event) and not evidence.now.stopped
    claim = Claim(
        f"It {'is stopped' if evidence.now.stopped else 'hangs'}: {since}", "certain", tuple(readings)
    )
    if busy:
        claim = Claim(f"It may hang: it computes, and did {since}", "possible", tuple(readings))
    return Cause(
        id="hang",
        claim=claim,
        actor=_reason(evidence, event),
        cascade=(Claim(since, "certain", (read,)),) if busy else (),
        next=_next(evidence, busy),
        survivable=True,
    )


def _reason(evidence: Evidence, event: dict[str, object]) -> Claim | None:
    states = [text(thread.get("state")) for thread in mappings(event.get("threads"))]
    source = Reading(
        f"thread states: {', '.join(sorted({state for state in states if state}))}", "events.jsonl"
    )
    if evidence.now.stopped or is_stopped(event.get("threads")):
        if evidence.now.stopped:
            source = Reading("state T: stopped", f"/proc/{evidence.pid}/stat", evidence.now.wall)
        return Claim("it was stopped by a signal (Ctrl-Z, SIGSTOP) or a debugger", "certain", (source,))
    if "D" in states:
        return Claim("a thread waits in the kernel, on a disk or a mounted drive", "likely", (source,))
    stack = _stack(evidence)
    frames = last_stack(stack)
    place = (user_frame(stack) or frames[0]) if frames else None
    at = f", in {printable(str(place), 90)}" if place else ""
    reading = (Reading(f"stack: {place}", "stacks.txt"),) if place else ()
    if is_busy(event):
        work = "save" if event.get("phase") == "checkpoint" else "evaluation"
        return Claim(f"a long {work}, or an endless loop{at}", "possible", reading)
    if not frames:
        return None
    waits = _WAITS.get(frames[0].function)
    return Claim(
        f"it is {waits or 'blocked'}{at.replace(',', '', 1)}", "likely" if waits else "possible", reading
    )


def _stack(evidence: Evidence) -> str:
    return evidence.speaker.stacks.text if evidence.speaker else ""


def _next(evidence: Evidence, busy: bool) -> tuple[str, ...]:
    if evidence.now.stopped:
        return (how_to_continue(evidence),)
    pid = evidence.pid
    steps = []
    if busy:
        steps.append("wait, if this is an evaluation or another long piece of work: it computes")
    if evidence.speaker and evidence.speaker.stacks.text:
        path = f"{evidence.folder}/process-{evidence.speaker.pid}/stacks.txt"
        steps.append(f"read where every thread stands: `cat {typed(path)}`")
    if was_notebook(evidence):
        steps.append("interrupt the cell (the stop button, or Kernel > Interrupt): the variables stay")
        steps.append(
            f"if that does not help, restart the kernel, or `kill -TERM {pid}`: its variables are lost then"
        )
        return tuple(steps if busy else (*steps[-2:], *steps[:-2]))
    steps.append(
        f"`kill -TERM {pid}` ends it with its stacks written down; `kill -KILL {pid}` if it does not react"
    )
    if not busy:
        steps.append(
            "if it waits for DataLoader workers, try once with `num_workers=0`: the real error then shows"
        )
    return tuple(steps)
