"""The GPU's memory did not suffice for one more allocation."""

from __future__ import annotations

from buoy.text import printable
from buoy.units import format_bytes, format_share
from buoy.verdict.causes.common import gpu_grade, raised_as
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.trend import Growth, foretold
from buoy.verdict.values import count, mappings, text


def judge(evidence: Evidence) -> Cause | None:
    """Certain: the framework's own exception, or its words where a GPU was seen."""
    found = raised_as(evidence, "gpu-oom")
    if found is None:
        return None
    asked = found.finding.asked
    what = f" for another {format_bytes(asked)}" if asked else ""
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
        claim=Claim(f"The GPU's memory did not suffice{what}", gpu_grade(evidence, found), tuple(readings)),
        cascade=found.cascade,
        next=_next(found.finding.type, found.finding.message, growth),
    )


def _next(kind: str, message: str, growth: Growth | None) -> tuple[str, ...]:
    if growth is not None:
        return (
            f"find what is kept for ever on the GPU: it grew {growth}; the usual ones are losses and outputs in a list "
            "(keep `loss.item()`), and graphs that are kept with them (`.detach()`)",
        )
    first = "halve the batch and accumulate gradients over two (batch norm and in-batch losses will notice)"
    if kind.startswith("torch.") or "PYTORCH" in message or "Tried to allocate" in message:
        return (
            first,
            "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` helps if much is reserved but unallocated",
            "activation checkpointing (`torch.utils.checkpoint`) trades time for memory where activations own the peak",
        )
    return (
        first,
        "in a notebook, restart the kernel: a failed cell keeps its tensors alive through its traceback",
    )
