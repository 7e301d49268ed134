"""BY503: the batches after the last full window never reach the optimizer in their epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.accumulation import Guard, find_guards
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.rules.accumulation_scale import accumulates
from buoy.lint.target import Target

RULE = Rule("BY503", "accumulation-tail", "the last, incomplete accumulation window is not applied")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Guards over `enumerate(loader)` with no test for the last batch and no step after the loop."""
    for guard in find_guards(facts):
        if (
            not guard.alone
            or not accumulates(guard, facts)
            or not _counts_batches(guard)
            or _steps_after(guard, facts)
        ):
            continue
        shown = ast.unparse(guard.every)
        if guard.offset == 0:
            message = (
                f"`{guard.index.id} % {shown} == 0` is true at the very first batch: a step after "
                "one batch, and the last ones of the epoch wait"
            )
            hint = f"test `({guard.index.id} + 1) % {shown} == 0 or {guard.index.id} + 1 == len(loader)`"
        else:
            message = (
                f"when the number of batches is no multiple of {shown}, the last gradients of "
                "the epoch are not applied: "
                "they leak into the next epoch's first step, and after the last epoch they are lost"
            )
            hint = f"add `or {guard.index.id} + 1 == len(loader)` to the test, or step once after the loop"
        yield Finding(facts.document.span(guard.test), "warning", message, hint)


def _counts_batches(guard: Guard) -> bool:
    """`for i, batch in enumerate(...)` with our index, from zero: other counters may run on across epochs."""
    loop = guard.loop.node
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple) or not loop.target.elts:
        return False
    first = loop.target.elts[0]
    wrapped = [
        node
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "enumerate"
    ]
    if not (isinstance(first, ast.Name) and first.id == guard.index.id and wrapped):
        return False
    return len(wrapped[0].args) == 1 and not wrapped[0].keywords


def _steps_after(guard: Guard, facts: Facts) -> bool:
    end = getattr(guard.loop.node, "end_lineno", 0) or 0
    function = guard.loop.function()
    return any(
        call.node.lineno > end and call.dotted == guard.step.dotted and call.block.function() is function
        for call in facts.calls["step"]
    )
