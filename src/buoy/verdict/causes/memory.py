"""Memory ran out: of the machine or its container, of this process, or of the GPU; with faults of the GPU."""

from __future__ import annotations

from buoy.fields import count, mappings, text
from buoy.machine.kernel_log import parse_oom_kill, parse_xid
from buoy.text import printable
from buoy.units import format_bytes, format_share
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes.common import end_readings, gpu_grade, memory_ceiling, raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.exceptions import is_in_a_worker
from buoy.verdict.memory import Growth, foretold, growth_before_the_end, growth_of_others, named_advice
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.oom import describe_limit, examine, memory_reading
from buoy.verdict.stacks import headline


def judge_kernel_oom(evidence: Evidence) -> Cause | None:
    """`kernel-oom`: the kernel killed it because the machine or its memory group ran out of memory.

    Certain when the kernel log names this process, or its memory group counted a kill and no other can be meant.
    """
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
    readings += end_readings(evidence)
    seen = memory_reading(evidence)
    if seen is not None and seen not in readings:
        readings.append(seen)
    readings += _colab(evidence)
    return Cause(
        id="kernel-oom",
        claim=Claim(f"Killed by the kernel's OOM killer: {room} was used up", finding.grade, tuple(readings)),
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
    return (*remedies(evidence, limit, peak)[:2], how_to_resume(evidence))


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
            "shows them; end them, or give the training its own limit"
        )
    named = named_advice(evidence, grows=growth is not None)
    if growth is not None and named is not None:
        steps.append(f"memory grew {growth}: {named}")
    elif growth is not None and growth.is_by_step:
        steps.append(
            f"find what is never released: memory grew {growth}; usually losses and outputs in a list (keep "
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
            f"lower `num_workers`: {len(children)} child processes held {format_bytes(held)} besides the main one; "
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
            "keep the data set out of RAM: read it in pieces or memory-map it; the batch is on the GPU"
        )
    elif has_steps:
        steps.append(
            "without a GPU the batch is in RAM too: halve it and accumulate gradients over two; "
            "and keep the data set out of RAM (read it in pieces, memory-map it)"
        )
    else:
        steps.append(
            "no steps were counted: if it was still loading, load the data in pieces, and the model without a "
            "second copy"
        )
    return steps


def judge_memory_error(evidence: Evidence) -> Cause | None:
    """`memory-error`: an allocation in RAM was refused, and Python or a framework said so.

    Certain: the exception is the evidence. Why it was refused is only possible to say.
    """
    found = raised_as(evidence, "memory-error")
    if found is None:
        return None
    asked = found.finding.asked
    what = (
        f"An allocation of {format_bytes(asked)} of RAM was refused"
        if asked
        else "An allocation in RAM was refused"
    )
    limit, _ = describe_limit(evidence)
    available = count(evidence.last_sample.get("available"))
    readings = list(found.evidence)
    if available is not None:
        room = f"RAM available just before: {format_bytes(available)}"
        readings.append(Reading(room, "samples", evidence.last_wall))
    return Cause(
        id="memory-error",
        claim=Claim(what, found.grade, tuple(readings)),
        actor=_reason(evidence, asked, available, limit),
        cascade=found.cascade,
        next=_in_a_worker()
        if is_in_a_worker(found.finding)
        else _memory_error_next(evidence, asked, available, limit),
    )


def _reason(evidence: Evidence, asked: int | None, available: int | None, limit: int | None) -> Claim:
    room = min((value for value in (available, limit) if value is not None), default=None)
    if asked is not None and room is not None and asked > room:
        return Claim(f"it asked for more memory than there is ({format_bytes(room)})", "likely")
    was_read, ceiling = memory_ceiling(evidence)
    if ceiling is not None:
        words = (
            f"a limit on the memory of a process was set: {format_bytes(ceiling)} (`ulimit -v`, `ulimit -d`)"
        )
        return Claim(words, "likely")
    if was_read:
        left = f": {format_bytes(available)} were available" if available is not None else ""
        return Claim(f"it asked at once for more than the machine can give{left}", "possible")
    return Claim("a limit on address space (`ulimit -v`), or memory that is in use by others", "possible")


def _memory_error_next(
    evidence: Evidence, asked: int | None, available: int | None, limit: int | None
) -> tuple[str, ...]:
    room = min((value for value in (available, limit) if value is not None), default=None)
    if asked is not None and room is not None and asked > room:
        return (
            f"make it smaller or build it in pieces: {format_bytes(asked)} never fits into {format_bytes(room)}",
            "for data: `numpy.memmap` or a reader that yields batches instead of one array",
        )
    was_read, ceiling = memory_ceiling(evidence)
    pieces = "build or load the object of that line in pieces"
    if was_read and ceiling is None:
        return (f"{pieces}; check the size that it works out to: no limit on address space was set",)
    return ("`ulimit -v` shows a limit on address space; `ulimit -v unlimited` lifts it", pieces)


def _in_a_worker() -> tuple[str, ...]:
    """The line that the main process stands in only waits for its workers."""
    return (
        "run once with `num_workers=0`: the line of the data set that asks for the memory then shows",
        "fewer workers, a lower `prefetch_factor` or smaller batches need less: each worker holds its own",
    )


def judge_gpu_oom(evidence: Evidence) -> Cause | None:
    """`gpu-oom`: the GPU had no memory left for an allocation.

    Certain: the framework's own exception, or its words where a GPU was seen.
    """
    found = raised_as(evidence, "gpu-oom")
    if found is None:
        return None
    asked = found.finding.asked
    what = f" allocating another {format_bytes(asked)}" if asked else ""
    readings = list(found.evidence)
    for device in mappings(evidence.death.get("gpu"))[:1]:
        name = printable(text(device.get("name")) or "GPU", 40)
        share = format_share(count(device.get("used")), count(device.get("total")))
        readings.append(Reading(f"{name}: {share} in use when it was read", "death.json", evidence.died_wall))
    growth = foretold(evidence, "vram")
    if growth is not None and growth.warned is not None:
        readings.append(growth.warned)
    return Cause(
        id="gpu-oom",
        claim=Claim(f"The GPU ran out of memory{what}", gpu_grade(evidence, found), tuple(readings)),
        cascade=found.cascade,
        next=_gpu_oom_next(found.finding.type, found.finding.message, growth),
    )


def _gpu_oom_next(kind: str, message: str, growth: Growth | None) -> tuple[str, ...]:
    if growth is not None:
        return (
            f"find what is never released on the GPU: it grew {growth}; usually losses and outputs in a list "
            "(keep `loss.item()`), and graphs that are kept with them (`.detach()`)",
        )
    first = "halve the batch and accumulate gradients over two (batch norm and in-batch losses will differ)"
    if kind.startswith("torch.") or "PYTORCH" in message or "Tried to allocate" in message:
        return (
            first,
            "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` helps if much is reserved but unallocated",
            "activation checkpointing (`torch.utils.checkpoint`) trades time for memory if activations dominate it",
        )
    return (
        first,
        "in a notebook, restart the kernel: a failed cell keeps its tensors alive through its traceback",
    )


def judge_gpu_fault(evidence: Evidence) -> Cause | None:
    """`gpu-fault`: an assertion in a GPU kernel, a bad access, a device that is gone.

    Certain that CUDA reported it; where in the program is uncertain, since CUDA reports late.
    """
    found = raised_as(evidence, "gpu-fault")
    if found is None:
        return None
    xids = [line for line in evidence.own_death.lines if parse_xid(str(line["text"]))]
    readings = (
        *found.evidence,
        *(Reading(printable(str(line["text"]), 160), "kernel log") for line in xids[-1:]),
    )
    asserted = "device-side assert" in found.finding.message
    what = "An assertion failed inside a GPU kernel" if asserted else "The GPU reported a fault"
    steps = [
        "the line shown is where it was noticed: run once with `CUDA_LAUNCH_BLOCKING=1` to see where it happened"
    ]
    if asserted:
        steps.insert(
            0,
            "check that every label and index is in range (labels < classes, ids < table size)",
        )
    if xids:
        steps.insert(
            0, "the driver logged a hardware-level error (Xid): take another machine if it comes again"
        )
    steps.append(how_to_resume(evidence))
    return Cause(
        "gpu-fault",
        Claim(what, gpu_grade(evidence, found), readings),
        None,
        found.cascade,
        tuple(steps[:3]),
        survivable=bool(xids),
    )
