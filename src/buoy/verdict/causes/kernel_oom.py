"""The kernel killed it because memory ran out: of its memory group (a container's limit) or of the machine."""

from __future__ import annotations

from buoy.machine.kernel_log import parse_oom_kill
from buoy.text import printable
from buoy.units import format_bytes, format_share
from buoy.verdict.causes.common import status_reading
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.memory import named_advice
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import describe_limit, examine, memory_reading
from buoy.verdict.traces import headline
from buoy.verdict.trend import growth_before_the_end, growth_of_others
from buoy.verdict.values import count, mappings


def judge(evidence: Evidence) -> Cause | None:
    """Certain when the kernel log names this process, or its memory group counted a kill and no other can be meant."""
    if not evidence.death or _ended_otherwise(evidence):
        return None
    finding = examine(evidence, evidence.own_death)
    if finding.answer != "oom":
        return None
    limit, peak = describe_limit(evidence)
    on_machine = _is_global(evidence)
    room = (
        "the machine's memory"
        if on_machine or limit is None
        else f"its memory limit of {format_bytes(limit)}"
    )
    readings = list(finding.evidence)
    growth = growth_before_the_end(evidence, limit)
    if growth is not None and growth.warned is not None:
        readings.append(growth.warned)
    if evidence.status.known:
        readings.append(status_reading(evidence))
    seen = memory_reading(evidence)
    if seen is not None and seen not in readings:
        readings.append(seen)
    readings += _colab(evidence)
    return Cause(
        id="kernel-oom",
        claim=Claim(f"The kernel's OOM killer ended it: {room} was used up", finding.grade, tuple(readings)),
        actor=Claim("the Linux kernel", finding.grade),
        next=_next(evidence, limit, peak),
        survivable=True,
    )


def _ended_otherwise(evidence: Evidence) -> bool:
    """Without a status, last words of another kind come before a counter; the kernel log's own word does not."""
    if evidence.status.known:
        return evidence.status.signal != 9
    named = [parse_oom_kill(str(line["text"])) for line in evidence.own_death.lines]
    if evidence.attempt.get("initial_pid_namespace") is True and any(
        found and found.get("pid") == evidence.pid for found in named
    ):
        return False
    speaker = evidence.main
    return bool(speaker and (speaker.note or headline(speaker.fault.text)))


def _is_global(evidence: Evidence) -> bool:
    lines = [str(line["text"]) for line in evidence.own_death.lines]
    return any("constraint=CONSTRAINT_NONE" in line and f"pid={evidence.pid}," in line for line in lines)


def _colab(evidence: Evidence) -> list[Reading]:
    recorded = evidence.death.get("colab_events")
    lines = recorded.get("lines") if isinstance(recorded, dict) else None
    words = (
        [line for line in lines if isinstance(line, str) and "oom_kill" in line]
        if isinstance(lines, list)
        else []
    )
    return [Reading(f"Colab noted {printable(words[-1], 60)}", "/var/colab/events")] if words else []


def _next(evidence: Evidence, limit: int | None, peak: int | None) -> tuple[str, ...]:
    return (*remedies(evidence, limit, peak)[:2], go_on(evidence))


def remedies(evidence: Evidence, limit: int | None, peak: int | None, has_workers: bool = True) -> list[str]:
    """What would lower the memory, as the readings point to it: the best first.

    `has_workers`: whether children of the watched process are its workers; a shell's child is the training itself.
    """
    steps = []
    has_steps = bool(count(evidence.last_sample.get("step")))
    growth = growth_before_the_end(evidence, limit)
    others = growth_of_others(evidence)
    if others is not None:
        steps.append(
            f"other programs grew, about {format_bytes(others)} a second, and not the training: `ps aux --sort -rss` "
            "shows them; end them, or give the training a limit of its own"
        )
    named = named_advice(evidence, grows=growth is not None)
    if growth is not None and named is not None:
        steps.append(f"memory grew {growth}: {named}")
    elif growth is not None and growth.is_by_step:
        steps.append(
            f"find what is kept for ever: memory grew {growth}; the usual ones are losses and outputs in a list (keep "
            "`loss.item()`), and results gathered over an epoch"
        )
    elif growth is not None:
        steps.append(
            f"load or build in pieces what was made at the end: memory grew {growth} until it was full; if that was a "
            "loop whose steps nobody counts, find what it keeps"
        )
    elif named is not None:
        steps.append(named)
    children = [p for p in mappings(evidence.death.get("processes")) if p.get("role") == "child"]
    held = sum(count(child.get("rss")) or 0 for child in children)
    if has_workers and children and limit and held > 0.2 * limit:
        steps.append(
            f"lower `num_workers`: {len(children)} child processes held {format_bytes(held)} beside the main one; "
            "each copies the Python objects of the data set"
        )
    if limit and peak and peak < 0.7 * limit:
        steps.append(
            f"one sudden allocation did it (memory was at {format_share(peak, limit)} just before): "
            "build or load that object in pieces"
        )
    if growth is not None and growth.is_by_step:
        return steps  # what is never freed fills any room: a smaller batch only makes it take longer
    if evidence.death.get("gpu"):
        steps.append(
            "keep the data set out of RAM: read it in pieces or memory-map it; the batch lives on the GPU"
        )
    elif has_steps:
        steps.append(
            "without a GPU the batch lives in RAM too: halve it and accumulate gradients over two; "
            "and keep the data set out of RAM (read it in pieces, memory-map it)"
        )
    else:
        steps.append(
            "no steps were counted: if it was still loading, load the data in pieces, and the model without a "
            "second copy"
        )
    return steps
