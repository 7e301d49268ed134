"""Evaluation loops of torch that run with gradients on: shared by BY402 and BY403."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from buoy.lint.facts import Block, Call, Facts, dotted_name
from buoy.lint.frameworks import scope_key, uses_torch, without_gradients

_BACKWARD = ("backward", "grad", "requires_grad_", "manual_backward", "attack", "perturb")


@dataclass(slots=True)
class EvalLoop:
    """`model.eval()` and then a loop that calls the model, with the gradients on."""

    switch: Call
    loop: Block
    call: Call


def eval_loops(facts: Facts) -> list[EvalLoop]:
    """Every such loop; nothing where gradients are off, needed or frozen."""
    if "eval_loops" not in facts.memo:
        facts.memo["eval_loops"] = _find(facts) if uses_torch(facts) and "eval" in facts.calls else []
    found: list[EvalLoop] = facts.memo["eval_loops"]
    return found


def _find(facts: Facts) -> list[EvalLoop]:
    if _gradients_off_everywhere(facts):
        return []
    found: list[EvalLoop] = []
    seen: set[int] = set()
    for switch in facts.calls["eval"]:
        name = dotted_name(switch.receiver) if switch.receiver is not None else None
        if name is None or switch.node.args or not isinstance(switch.statement, ast.Expr):
            continue
        for call in facts.calls.get(name.rpartition(".")[2], ()):
            loop = _loop_after(switch, call, name, facts)
            if loop is not None and id(loop) not in seen and _judged(loop, call, facts):
                seen.add(id(loop))
                found.append(EvalLoop(switch, loop, call))
    return found


def _loop_after(switch: Call, call: Call, name: str, facts: Facts) -> Block | None:
    """The outermost loop around a call of the model that starts after the switch, in the same
    function, before `train()`.
    """
    if call.dotted != name or call.block.function() is not switch.block.function():
        return None
    if scope_key(call.node.func, call.block) != scope_key(switch.receiver or call.node, switch.block):
        return None
    after = [
        loop
        for loop in call.block.loops()
        if loop.node is not None and getattr(loop.node, "lineno", 0) > switch.node.lineno
    ]
    if not after or not after[-1].inside(switch.block):
        return None
    start = switch.node.lineno
    for other in facts.calls.get("train", ()):
        if (
            other.dotted == f"{name}.train"
            and start < other.node.lineno < call.node.lineno
            and not _false(other)
        ):
            return None
    return after[-1]


def _false(call: Call) -> bool:
    return (
        bool(call.node.args) and isinstance(call.node.args[0], ast.Constant) and not call.node.args[0].value
    )


def _judged(loop: Block, call: Call, facts: Facts) -> bool:
    if without_gradients(call.block, facts):
        return False
    function = loop.function()
    if function.kind == "function" and function.scope.name not in facts.calls:
        return False  # called from elsewhere, perhaps under no_grad
    if (
        function.kind == "function"
        and function.scope.parent is not None
        and function.scope.parent.kind == "class"
    ):
        return False  # a method: Lightning and its kin call it without gradients
    for word in _BACKWARD:
        if any(
            other.block.inside(function) and (other.block.inside(loop) or word != "backward")
            for other in facts.calls.get(word, ())
        ):
            return False
    return not _has_break(loop)


def _has_break(loop: Block) -> bool:
    body = getattr(loop.node, "body", [])
    return any(isinstance(statement, ast.Break | ast.Return) for statement in body)


def _gradients_off_everywhere(facts: Facts) -> bool:
    if any(
        binding.value is not None and isinstance(binding.value, ast.Constant) and binding.value.value is False
        for name, bindings in facts.fields.items()
        if name.endswith("requires_grad")
        for binding in bindings
    ):
        return True
    return any(call.keyword("volatile") is not None for call in facts.calls.get("Variable", ()))
