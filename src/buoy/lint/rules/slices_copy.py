"""BY604: `from_tensor_slices` of a large array: TensorFlow keeps a second copy of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.model import Finding, Rule, Severity
from buoy.lint.sizes import allocations
from buoy.lint.target import Target
from buoy.units import format_bytes, format_share

RULE = Rule("BY604", "slices-copy", "from_tensor_slices copies an array that is large already")

_LARGE_SHARE = 0.25


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Arrays of known size given to `from_tensor_slices`; the peak is three times the array (measured)."""
    calls = facts.calls.get("from_tensor_slices", ())
    if not calls:
        return
    sizes = {item.call.node: item.bytes(facts) for item in allocations(facts)}
    for call in calls:
        size = sum(sizes.get(value) or 0 for value in _arrays(call, facts))
        limit = target.ram
        if not size or limit is None or size * 3 < _LARGE_SHARE * limit:
            continue
        severity: Severity = "error" if size * 3 >= limit else "warning"
        message = (
            f"the array has {format_bytes(size)}, and TensorFlow copies it: "
            f"{format_share(size * 3, limit)} at the peak on {target.words}"
        )
        yield Finding(
            facts.document.span(call.node),
            severity,
            message,
            "`tf.data.Dataset.from_generator`, or files read by the pipeline, hold one batch",
        )


def _arrays(call: Call, facts: Facts) -> list[ast.Call]:
    argument = call.node.args[0] if call.node.args else None
    items = argument.elts if isinstance(argument, ast.Tuple) else [argument]
    values = [facts.single_value(item, call.block) if isinstance(item, ast.Name) else item for item in items]
    return [value for value in values if isinstance(value, ast.Call)]
