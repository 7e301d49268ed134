"""It lives, but has not taken a step for far longer than its steps take."""

from __future__ import annotations

from buoy.units import format_duration
from buoy.verdict.causes.common import how_to_continue, standing_hang, step_of
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
    """Certain that it hangs; what it waits for is read from the stacks and only likely."""
    event = standing_hang(evidence)
    if event is None or evidence.is_dead:
        return None
    age = number(event.get("age"))
    share = number(event.get("cpu_share"))
    since = f"no step since {step_of(event)}"
    wall = number(event.get("wall"))
    readings = [Reading(f"{since}, for {format_duration(age)} when noticed", "events.jsonl", wall)]
    if share is not None:
        readings.append(Reading(f"it used {100 * share:.0f} % of one core meanwhile", "events.jsonl", wall))
    return Cause(
        id="hang",
        claim=Claim(f"It hangs: {since}", "certain", tuple(readings)),
        actor=_reason(evidence, event, share),
        next=_next(evidence),
        survivable=True,
    )


def _reason(evidence: Evidence, event: dict[str, object], share: float | None) -> Claim | None:
    states = [text(thread.get("state")) for thread in mappings(event.get("threads"))]
    source = Reading(
        f"thread states: {', '.join(sorted({state for state in states if state}))}", "events.jsonl"
    )
    if evidence.now.stopped or (states and all(state in ("T", "t") for state in states)):
        if evidence.now.stopped:
            source = Reading("state T: stopped", f"/proc/{evidence.pid}/stat", evidence.now.wall)
        return Claim("it was stopped by a signal (Ctrl-Z, SIGSTOP) or a debugger", "certain", (source,))
    if "D" in states:
        return Claim("a thread waits in the kernel, on a disk or a mounted drive", "likely", (source,))
    stack = _stack(evidence)
    frames = last_stack(stack)
    if not frames:
        return None
    place = user_frame(stack) or frames[0]
    reading = (Reading(f"stack: {place}", "stacks.txt"),)
    if share is not None and share > 0.5:
        return Claim(f"it computes without end in {printable(str(place), 90)}", "possible", reading)
    waits = _WAITS.get(frames[0].function)
    return Claim(
        f"it is {waits or 'blocked'} in {printable(str(place), 90)}",
        "likely" if waits else "possible",
        reading,
    )


def _stack(evidence: Evidence) -> str:
    return evidence.speaker.stacks.text if evidence.speaker else ""


def _next(evidence: Evidence) -> tuple[str, ...]:
    if evidence.now.stopped:
        return (how_to_continue(evidence),)
    pid = evidence.pid
    steps = [
        f"`kill -TERM {pid}` ends it with its stacks written down; `kill -KILL {pid}` if it does not react"
    ]
    if evidence.speaker and evidence.speaker.stacks.text:
        path = f"{evidence.folder}/process-{evidence.speaker.pid}/stacks.txt"
        steps.insert(0, f"read where every thread stands: `cat {typed(path)}`")
    steps.append(
        "if it waits for DataLoader workers, try once with `num_workers=0`: the real error then shows"
    )
    return tuple(steps)
