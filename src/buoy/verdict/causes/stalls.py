"""The process is alive: it runs, hangs, or spends its time waiting for memory pages."""

from __future__ import annotations

from buoy.fields import mappings, number, text
from buoy.flight.alarms.stall import state_of
from buoy.text import printable, typed
from buoy.units import format_bytes, format_duration
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes.common import how_to_continue, standing_hang, step_of
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Grade, Reading
from buoy.verdict.stacks import last_stack, user_frame

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
_IDS = {"starved": "starved", "network": "waiting", "disk": "waiting", "sleep": "waiting"}


def judge_hang(evidence: Evidence) -> Cause | None:
    """`hang`, `starved`, `waiting`: no step for far longer than steps take.

    Certain only where the threads prove it; before a first step only starvation and a proven deadlock count.
    """
    event = standing_hang(evidence)
    if event is None or evidence.is_dead:
        return None
    state = "stopped" if evidence.now.stopped else state_of(event)
    if event.get("is_quiet") is True:
        return None  # still starting: `still_running` says so
    since = f"no step since {step_of(event)}"
    wall = number(event.get("wall"))
    read = Reading(
        f"{since}, for {format_duration(number(event.get('age')))} when noticed", "events.jsonl", wall
    )
    claim = Claim(f"{_words(event, state)}: {since}", _grade(event, state), (read, *_readings(event, state)))
    is_open = state in ("busy", "waiting")
    return Cause(
        id=_IDS.get(state, "hang"),
        claim=claim,
        actor=_reason(evidence, event, state),
        cascade=(Claim(since, "certain", (read,)),) if is_open else (),
        next=_next(evidence, state),
        survivable=True,
    )


def past(evidence: Evidence, event: dict[str, object]) -> Claim | None:
    """The same of one that has ended since, for its cascade; None where it had not begun to train."""
    if event.get("is_quiet") is True:
        return None
    age, t, end = number(event.get("age")), number(event.get("t")), evidence.last_t
    total = age + max(0.0, end - t) if age is not None and t is not None and end is not None else age
    since = f"since {step_of(event)}, for {format_duration(total)}"
    words = {
        "blocked": f"it had hung {since}",
        "busy": f"no step had come {since}, while it computed",
        "stopped": f"it had been stopped by a signal: no step {since}",
        "starved": f"it had been starved of CPU: no step {since}",
        "network": f"it had waited for the network: no step {since}",
        "disk": f"it had waited for a disk: no step {since}",
        "sleep": f"it had slept: no step {since}",
    }.get(state_of(event), f"it had waited: no step {since}")
    grade = _grade(event, state_of(event))
    if state_of(event) == "starved" and grade != "certain":
        words = f"it had been short of CPU while it computed: no step {since}"
        if text(event.get("waits")) is None:  # its main thread was seen ready to run
            grade = "certain"
    reading = Reading(f"no step for {format_duration(age)}", "events.jsonl", number(event.get("wall")))
    # That no step came is certain; that it hung, or had to wait, is as sure as the threads made it.
    return Claim(words, "certain" if state_of(event) == "busy" else grade, (reading,))


def starting(event: dict[str, object]) -> str | None:
    """What one that has not begun to train was seen to wait for, after "it"; None when it was not seen to wait."""
    if state_of(event) == "network":
        return f"waits for the network: {_traffic(event)}"
    return printable(text(event.get("waits")) or "", 120) or None


def _grade(event: dict[str, object], state: str) -> Grade:
    if state == "stopped" or event.get("is_certain") is True:
        return "certain"
    return "likely" if state in ("blocked", "disk", "network", "starved", "sleep") else "possible"


def _words(event: dict[str, object], state: str) -> str:
    if state == "blocked":
        return "It hangs" if event.get("is_certain") is True else "It seems to hang"
    return {
        "stopped": "It is stopped",
        "starved": "It is starved of CPU",
        "network": f"It waits for the network ({_traffic(event)})",
        "disk": "It waits for a disk or a mounted drive",
        "sleep": "It sleeps",
        "busy": "It may hang, or compute",
    }.get(state, "It may hang, or wait")


def _traffic(event: dict[str, object]) -> str:
    return f"{format_bytes(number(event.get('network')))} come and go each second"


def _readings(event: dict[str, object], state: str) -> list[Reading]:
    wall = number(event.get("wall"))
    share, delayed, quota = (number(event.get(key)) for key in ("cpu_share", "delayed", "quota"))
    found = []
    if share is not None:
        found.append(f"it used {100 * share:.0f} % of one core meanwhile")
    if state == "starved" and delayed is not None:
        found.append(f"ready to run, and without a CPU {100 * delayed:.0f} % of the time")
    if state == "starved" and event.get("is_certain") is not True:
        found.append("it may have got the CPU time of a step: this may be longer work, or an endless loop")
    if quota is not None:
        found.append(f"its CPU quota is {quota:.2g} cores")
    if state == "blocked" and event.get("is_certain") is True:
        found.append(
            "none of its threads ran between two checks; each waits for another of them, with no timeout"
        )
    return [Reading(words, "events.jsonl", wall) for words in found]


def _reason(evidence: Evidence, event: dict[str, object], state: str) -> Claim | None:
    states = {text(thread.get("state")) for thread in mappings(event.get("threads"))}
    source = Reading(f"thread states: {', '.join(sorted(filter(None, states)))}", "events.jsonl")
    if state == "stopped":
        if evidence.now.stopped:
            source = Reading("state T: stopped", f"/proc/{evidence.pid}/stat", evidence.now.wall)
        return Claim("it was stopped by a signal (Ctrl-Z, SIGSTOP) or a debugger", "certain", (source,))
    if state == "starved":
        quota = number(event.get("quota"))
        if quota is not None:
            return Claim(f"its CPU quota of {quota:.2g} cores, or other programs in that group", "likely")
        return Claim("other programs on this machine take the CPU", "likely")
    stack = _stack(evidence)
    frames = last_stack(stack)
    place = (user_frame(stack) or frames[0]) if frames else None
    at = f", in {printable(str(place), 90)}" if place else ""
    reading = (Reading(f"stack: {place}", "stacks.txt"),) if place else ()
    if state == "busy":
        work = "save" if event.get("phase") == "checkpoint" else "evaluation"
        return Claim(f"a long {work}, or an endless loop{at}", "possible", reading)
    seen = printable(text(event.get("waits")) or "", 120)
    if seen:
        return Claim(f"it {seen}{at}", "likely", (source, *reading))
    if "D" in states:
        return Claim("a thread waits in the kernel, on a disk or a mounted drive", "likely", (source,))
    if not frames:
        return None
    waits = _WAITS.get(frames[0].function)
    return Claim(
        f"it is {waits or 'blocked'}{at.replace(',', '', 1)}", "likely" if waits else "possible", reading
    )


def _stack(evidence: Evidence) -> str:
    return evidence.speaker.stacks.text if evidence.speaker else ""


def _next(evidence: Evidence, state: str) -> tuple[str, ...]:
    if state == "stopped":
        return (how_to_continue(evidence),)
    if state == "starved":
        return (
            "give it more CPU: end other programs on this machine, or raise its quota (a container's `--cpus`)",
            "wait: it continues by itself, slowly; fewer loader workers and threads leave it more CPU",
        )
    if state == "network":
        return (
            "wait: data is still arriving",
            "copy the data to a local disk before training, if this comes often",
        )
    pid, is_open = evidence.pid, state != "blocked"
    steps = []
    if state == "busy":
        steps.append("wait, if this is an evaluation or another long piece of work: it computes")
    elif is_open:
        steps.append("wait, if you know what it waits for: nothing shows that it cannot end")
    if evidence.speaker and evidence.speaker.stacks.text:
        path = f"{evidence.folder}/process-{evidence.speaker.pid}/stacks.txt"
        steps.append(f"read where every thread stands: `cat {typed(path)}`")
    if evidence.is_kernel:
        steps.append("interrupt the cell (the stop button, or Kernel > Interrupt): the variables stay")
        steps.append(
            f"if that does not help, restart the kernel, or `kill -TERM {pid}`: its variables are lost then"
        )
        return tuple(steps if is_open else (*steps[-2:], *steps[:-2]))
    steps.append(
        f"`kill -TERM {pid}` ends it and records its stacks; `kill -KILL {pid}` if it does not respond"
    )
    if state in ("blocked", "waiting"):
        steps.append(
            "if it waits for DataLoader workers, try once with `num_workers=0`: the real error then shows"
        )
    return tuple(steps)


_STANDS = 600.0


def judge_thrashing(evidence: Evidence) -> Cause | None:
    """`thrashing`: it spends its time waiting for memory pages to come back from disk.

    Likely at most: slow steps and page faults go together, which of them came first is not recorded.
    """
    claim = standing(evidence)
    if claim is None or evidence.is_dead:
        return None
    return Cause("thrashing", claim, next=(
        "free memory: fewer DataLoader workers, a data set that is memory-mapped or read in pieces",
        how_to_resume(evidence),
    ), survivable=True)  # fmt: skip


def standing(evidence: Evidence) -> Claim | None:
    """The warning of thrashing that was given in the last ten minutes of the record, as a claim."""
    for event in reversed(evidence.events_of("warning")):
        t, end = number(event.get("t")), evidence.last_t
        if event.get("alarm") == "thrashing" and t is not None and end is not None and end - t < _STANDS:
            words = printable(text(event.get("text")) or "steps slow down while pages are read back", 160)
            reading = Reading(words, "events.jsonl", number(event.get("wall")))
            return Claim(
                "Memory is so short that pages are constantly evicted and read back",
                "likely",
                (reading,),
            )
    return None


def judge_still_running(evidence: Evidence) -> Cause | None:
    """`still-running`: it has not died. Certain: the same process, by pid and age, is there."""
    if evidence.is_dead:
        return None
    reading = Reading(
        f"process {evidence.pid} exists and is as old as the attempt",
        f"/proc/{evidence.pid}/stat",
        evidence.now.wall,
    )
    if evidence.now.stopped:
        stopped = Reading("state T: stopped", f"/proc/{evidence.pid}/stat", evidence.now.wall)
        claim = Claim(
            "It is alive but stopped (Ctrl-Z, SIGSTOP or a debugger)", "certain", (stopped, reading)
        )
        return Cause("still-running", claim, next=(how_to_continue(evidence),))
    words = "It is still running"
    event = standing_hang(evidence)
    if event is not None and event.get("is_quiet") is True:
        age = format_duration(number(event.get("age")))
        words = f"It is still starting, or trains without steps that buoy counts: none came in {age}"
        waits = starting(event)
        seen = f"it {waits}" if waits else "no thread was seen to wait"
        reading = Reading(seen, "events.jsonl", number(event.get("wall")))
    return Cause("still-running", Claim(words, "certain", (reading,)), next=("ask again when it has ended",))
