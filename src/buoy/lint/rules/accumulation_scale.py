"""BY502: gradients are added up over several batches and never divided: SGD's step is that many times too long."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.accumulation import Guard, find_guards
from buoy.lint.facts import Facts
from buoy.lint.fold import number
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

RULE = Rule(
    "BY502", "accumulation-not-divided", "accumulated gradients are not divided by the number of batches"
)

_BY_LENGTH = frozenset({"SGD", "ASGD"})


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Guards that accumulate (zero_grad only inside them) in a loop that divides nothing."""
    for guard in find_guards(facts):
        every = number(guard.every, facts, guard.step.block)
        if (
            (every is not None and every <= 1)
            or not accumulates(guard, facts)
            or _divides(guard, facts)
            or not _length_counts(guard, facts)
        ):
            continue
        shown = ast.unparse(guard.every)
        backward = next(call for call in facts.calls["backward"] if call.block.inside(guard.loop))
        message = (
            f"the gradients of {shown} batches are summed, not averaged: SGD goes {shown} times as far in each "
            "step, as if the learning rate were that much larger"
        )
        yield Finding(
            facts.document.span(backward.node),
            "warning",
            message,
            f"divide the loss before `backward()`: `loss = loss / {shown}`",
        )


def accumulates(guard: Guard, facts: Facts) -> bool:
    """Whether gradients really pile up: they are zeroed inside the test and nowhere else in the loop."""
    zeroing = [call for call in facts.calls.get("zero_grad", ()) if call.block.inside(guard.loop)]
    return bool(zeroing) and all(call.block.inside(guard.branch) for call in zeroing)


def _length_counts(guard: Guard, facts: Facts) -> bool:
    """Whether the optimizer is SGD: Adam and its kin divide by the size of the gradient, so that a factor is lost."""
    if guard.step.receiver is None:
        return False
    made = facts.values(guard.step.receiver, guard.step.block)
    return bool(made) and all(
        isinstance(value, ast.Call) and (facts.qualified(value.func) or "").rpartition(".")[2] in _BY_LENGTH
        for value in made
    )


def _divides(guard: Guard, facts: Facts) -> bool:
    words = {
        keyword.value.value
        for call in facts.calls.get("CrossEntropyLoss", ())
        for keyword in call.node.keywords
        if keyword.arg == "reduction" and isinstance(keyword.value, ast.Constant)
    }
    if "sum" in words or any(
        call.dotted.startswith(("accelerator.", "self.accelerator", "fabric.", "model_engine", "engine."))
        for call in facts.calls.get("backward", ())
    ):
        return True
    body = getattr(guard.loop.node, "body", [])
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                return True
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
                return True
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Mult)
                and any("scale" in part.id for part in ast.walk(node) if isinstance(part, ast.Name))
            ):
                return True
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("div", "div_", "mul_")
            ):
                return True
    return False
