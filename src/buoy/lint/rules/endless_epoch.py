"""BY605: an endless generator given to `fit` without a number of steps: the first epoch never ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Call, Facts
from buoy.lint.frameworks import is_keras_model
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

RULE = Rule("BY605", "endless-epoch", "an endless generator is fitted without steps_per_epoch")

_PAIRS = ((0, "x", "steps_per_epoch"), (99, "validation_data", "validation_steps"))


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`fit(generator())` where the generator is `while True: yield` in this file."""
    for call in facts.calls.get("fit", ()):
        if not is_keras_model(call.receiver, call.block, facts) or call.has_unknown_keywords:
            continue
        for position, name, steps in _PAIRS:
            source = call.argument(position, name)
            if source is None or call.keyword(steps) is not None:
                continue
            function = _generator(source, call, facts)
            if function is None:
                continue
            what = "the first epoch" if position == 0 else "the validation after the first epoch"
            message = (
                f"`{function.scope.name}` yields for ever and `{steps}` is not given: "
                f"{what} never ends, and nothing is saved"
            )
            yield Finding(
                facts.document.span(source), "error", message, f"give `{steps}=` (items // batch size)"
            )


def _generator(node: ast.expr, call: Call, facts: Facts) -> Block | None:
    if isinstance(node, ast.Name):
        value = facts.single_value(node, call.block)
        node = value if value is not None else node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    found = facts.functions.get(node.func.id, [])
    return found[0] if len(found) == 1 and _endless(found[0].node) else None


def _endless(function: ast.AST | None) -> bool:
    """`while True:` with a yield and no way out."""
    if not isinstance(function, ast.FunctionDef):
        return False
    for statement in function.body:
        if (
            isinstance(statement, ast.While)
            and isinstance(statement.test, ast.Constant)
            and statement.test.value
        ):
            inside = list(ast.walk(statement))
            ways_out = any(isinstance(node, ast.Break | ast.Return | ast.Raise) for node in inside)
            return not ways_out and any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside)
    return False
