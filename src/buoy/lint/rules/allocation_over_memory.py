"""BY301: an array whose stated size does not fit where it will run."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule, Severity
from buoy.lint.removed import strike
from buoy.lint.sizes import Allocation, allocations
from buoy.lint.target import Target
from buoy.units import format_bytes, format_share

RULE = Rule("BY301", "allocation-over-memory", "an array of a stated shape takes too much of the memory")

_LARGE_SHARE = 0.25
_NEVER_ALARMING = 256 << 20


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Arrays of known size against the target's RAM (or, for torch with a device, its device memory)."""
    for item in allocations(facts):
        size = item.bytes(facts)
        if size is None or size < _NEVER_ALARMING:
            continue
        on_device = item.call.keyword("device") is not None
        limit = target.vram if on_device else target.ram
        if limit is None or size < _LARGE_SHARE * limit:
            continue
        severity: Severity = "error" if size >= limit else "warning"
        yield Finding(
            facts.document.span(item.call.node),
            severity,
            _message(item, size, limit, on_device, target, facts),
            _hint(item, size, limit),
        )


def _message(item: Allocation, size: int, limit: int, on_device: bool, target: Target, facts: Facts) -> str:
    shape = " x ".join(str(value) for value in item.known(facts))
    kind = "device memory" if on_device else "RAM"
    start = (
        f"{shape} elements of {item.itemsize} bytes: {format_share(size, limit)} {kind} of "
        f"{target.words.partition(' (')[0]}"
    )
    if size < limit:
        return start
    return f"{start}; it cannot be allocated or filled{strike(facts, item.call.block, item.call.node.lineno)}"


def _hint(item: Allocation, size: int, limit: int) -> str:
    if item.itemsize == 8 and size // 2 < _LARGE_SHARE * limit:
        return f"`dtype=np.float32` halves it to {format_bytes(size // 2)}"
    return "read the data in pieces (`np.memmap`, a DataLoader, `tf.data`) instead of holding all of it"
