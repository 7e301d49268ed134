"""BY404: a second backward through a graph whose weights `step()` has changed in between."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Call, Facts, dotted_name
from buoy.lint.frameworks import uses_torch
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

RULE = Rule(
    "BY404", "backward-after-step", "backward through a graph whose weights were already changed by step()"
)

_CUTS = frozenset({"detach", "item", "data", "detach_", "no_grad"})


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`a.backward(retain_graph=True)`, `opt.step()`, `b.backward()` in one body, where b goes through
    the stepped model's output.
    """
    if not uses_torch(facts):
        return
    for first in facts.calls.get("backward", ()):
        retain = first.keyword("retain_graph")
        if not (isinstance(retain, ast.Constant) and retain.value is True) or not first.block.loops():
            continue
        body = [
            call
            for call in facts.calls["backward"]
            if call.block is first.block and call.node.lineno > first.node.lineno
        ]
        for second in body[:1]:
            step = _step_between(first, second, facts)
            models = _stepped_models(step, facts) if step else set()
            shared = _shared(first, second, step, models, facts) if step and models else None
            if step and shared:
                message = (
                    f"`{dotted_name(step.receiver) if step.receiver else 'step'}.step()` "
                    "changes the weights in place, and this backward "
                    f"still goes through `{shared}`, which was computed with the old ones: "
                    "RuntimeError on the first pass"
                )
                hint = (
                    f"call both `backward` first and step afterwards, or compute `{shared}` anew; "
                    f"`{shared}.detach()` if its gradient is not wanted"
                )
                yield Finding(facts.document.span(second.node), "error", message, hint)


def _step_between(first: Call, second: Call, facts: Facts) -> Call | None:
    return next(
        (
            call
            for call in facts.calls.get("step", ())
            if call.block is first.block and first.node.lineno < call.node.lineno < second.node.lineno
        ),
        None,
    )


def _stepped_models(step: Call, facts: Facts) -> set[str]:
    """The models whose parameters the optimizer was given; the step must be an optimizer's own."""
    if step.receiver is None:
        return set()
    models: set[str] = set()
    for value in facts.values(step.receiver, step.block):
        if value is None:
            return set()
        for node in ast.walk(value):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "parameters"
            ):
                name = dotted_name(node.func.value)
                if name:
                    models.add(name)
    return models


def _shared(first: Call, second: Call, step: Call, models: set[str], facts: Facts) -> str | None:
    """A name that a stepped model computed before the step and that both losses go through."""
    start, end = _loss(first), _loss(second)
    if start is None or end is None:
        return None
    assigned = _assignments(first.block, facts)
    before = _ancestors(start, assigned, first.node.lineno)
    after = _ancestors(end, assigned, second.node.lineno)
    for name in sorted(before & after):
        made = [(line, value) for line, value in assigned.get(name, []) if line < second.node.lineno]
        if len(made) != 1:
            continue
        line, value = made[0]
        if line < step.node.lineno and isinstance(value, ast.Call) and dotted_name(value.func) in models:
            return name
    return None


def _loss(call: Call) -> str | None:
    return call.receiver.id if isinstance(call.receiver, ast.Name) else None


def _assignments(block: Block, facts: Facts) -> dict[str, list[tuple[int, ast.expr]]]:
    """What the body itself assigns, in order."""
    found: dict[str, list[tuple[int, ast.expr]]] = {}
    for name, bindings in block.scope.bindings.items():
        for binding in bindings:
            if binding.block is block and binding.value is not None:
                found.setdefault(name, []).append((getattr(binding.node, "lineno", 0), binding.value))
    return found


def _ancestors(name: str, assigned: dict[str, list[tuple[int, ast.expr]]], line: int) -> set[str]:
    """Every name that a value was computed from, not looking past a detach."""
    found: set[str] = set()
    work = [(name, line)]
    while work:
        current, limit = work.pop()
        earlier = [(at, value) for at, value in assigned.get(current, []) if at < limit]
        if not earlier or current in found:
            continue
        found.add(current)
        at, value = earlier[-1]
        work += [(part, at) for part in _names(value)]
    return found


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute) and node.attr in _CUTS:
        return set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CUTS:
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}
