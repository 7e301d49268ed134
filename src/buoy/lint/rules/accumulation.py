"""BY501, BY502, BY503: gradient accumulation that counts wrong, does not divide, or loses the last batches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.accumulation import Guard, find_guards
from buoy.lint.constants import number
from buoy.lint.facts import Facts
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.rules.names import undefined_names
from buoy.lint.target import Target

ACCUMULATION_INDEX = Rule(
    "BY501", "accumulation-index", "the accumulation test uses an index that nothing sets"
)


def find_accumulation_index(facts: Facts, target: Target) -> Iterator[Finding]:
    """Guards whose index is undefined."""
    missing = {entry.name for entry in undefined_names(facts) if entry.deleted is None}
    for guard in find_guards(facts):
        if guard.index.id not in missing or facts.module.find(guard.index.id):
            continue
        message = f"`{guard.index.id}` in the accumulation test is not defined: NameError at the first batch"
        hint = f"`for {guard.index.id}, batch in enumerate(loader):`"
        yield Finding(
            facts.document.span(guard.index),
            "error",
            message,
            hint,
            _enumerate(guard.index.id, guard.loop.node, facts),
        )


def _enumerate(index: str, loop: ast.AST | None, facts: Facts) -> Fix | None:
    if not isinstance(loop, ast.For):
        return None
    target, source = facts.document.span(loop.target), facts.document.span(loop.iter)
    names = facts.document.text(target)
    if isinstance(loop.target, ast.Tuple) and not names.startswith("("):
        names = f"({names})"
    edits = (
        Edit(target, f"{index}, {names}"),
        Edit(Span(source.line, source.column, source.line, source.column), "enumerate("),
        Edit(Span(source.end_line, source.end_column, source.end_line, source.end_column), ")"),
    )
    return Fix(f"count with `enumerate` as `{index}`", edits, "unsafe")


ACCUMULATION_SCALE = Rule(
    "BY502", "accumulation-not-divided", "accumulated gradients are not divided by the number of batches"
)

_BY_LENGTH = frozenset({"SGD", "ASGD"})


def find_accumulation_scale(facts: Facts, target: Target) -> Iterator[Finding]:
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


ACCUMULATION_TAIL = Rule(
    "BY503", "accumulation-tail", "the last, incomplete accumulation window is not applied"
)


def find_accumulation_tail(facts: Facts, target: Target) -> Iterator[Finding]:
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
