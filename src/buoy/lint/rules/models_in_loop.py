"""BY801: a new Keras model in every pass of a loop: what each leaves behind adds up."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Call, Facts
from buoy.lint.fold import range_length
from buoy.lint.frameworks import makes_keras_model, uses_keras
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

RULE = Rule("BY801", "models-in-loop", "a Keras model is built and fitted in every pass of a loop")

_FEW = 20


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Loops that build a model and fit it, 20 times or more; a handful of folds is left alone."""
    if not uses_keras(facts) or not facts.calls.keys() & {"fit", "fit_generator", "train_on_batch"}:
        return
    seen: set[int] = set()
    for calls in list(facts.calls.values()):
        for call in calls:
            loops = call.block.loops()
            if not loops or not makes_keras_model(call.node, facts) or id(loops[-1]) in seen:
                continue
            passes = _passes(loops, facts)
            if (
                passes is not None
                and passes >= _FEW
                and _fits_inside(call, loops[0], facts)
                and not _leaves(loops)
            ):
                seen.add(id(loops[-1]))
                message = (
                    f"this loop builds and fits {passes} models in one process; each leaves memory behind "
                    "(measured 9 to 11 MiB for a small dense model, with and without `clear_session`)"
                )
                hint = (
                    "build once and set the first weights back (`model.set_weights(start)`), or "
                    "run each in a process of its own"
                )
                yield Finding(facts.document.span(call.node), "warning", message, hint)


def _passes(loops: list[Block], facts: Facts) -> int | None:
    total = 1
    for loop in loops:
        node = loop.node
        if not isinstance(node, ast.For):
            return None
        count = range_length(node.iter, facts, loop)
        if count is None and isinstance(node.iter, ast.List | ast.Tuple):
            count = len(node.iter.elts)
        if count is None:
            value = facts.single_value(node.iter, loop) if isinstance(node.iter, ast.Name) else None
            count = len(value.elts) if isinstance(value, ast.List | ast.Tuple) else None
        if count is None:
            return None
        total *= count
    return total


def _fits_inside(call: Call, loop: Block, facts: Facts) -> bool:
    return any(
        fit.block.inside(loop) for name in ("fit", "fit_generator") for fit in facts.calls.get(name, ())
    )


def _leaves(loops: list[Block]) -> bool:
    return any(
        isinstance(statement, ast.Break | ast.Return)
        for loop in loops
        for statement in getattr(loop.node, "body", [])
    )
