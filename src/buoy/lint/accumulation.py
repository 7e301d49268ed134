"""Gradient accumulation as it is usually written: `if (i + 1) % n == 0: optimizer.step()` inside a loop."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from buoy.lint.facts import Block, Call, Facts


@dataclass(slots=True)
class Guard:
    """One guarded optimizer step."""

    step: Call
    test: ast.expr
    index: ast.Name
    every: ast.expr
    offset: int
    """What is added to the index before the modulo: 1 in `(i + 1) % n`."""
    branch: Block
    loop: Block
    alone: bool
    """The test is the modulo and nothing else: no `or last batch`."""


def find_guards(facts: Facts) -> list[Guard]:
    """Every optimizer step behind a modulo test, in a loop that also calls backward outside that test."""
    if "guards" not in facts.memo:
        facts.memo["guards"] = _guards(facts) if "torch" in facts.packages and "step" in facts.calls else []
    guards: list[Guard] = facts.memo["guards"]
    return guards


def _guards(facts: Facts) -> list[Guard]:
    guards = []
    for step in facts.calls.get("step", ()):
        branch = next((block for block in step.block.up() if block.kind == "if"), None)
        loops = step.block.loops()
        if branch is None or not loops or not isinstance(branch.node, ast.If) or not branch.inside(loops[0]):
            continue
        found = _modulo(branch.node.test)
        if found is None:
            continue
        backwards = [call for call in facts.calls.get("backward", ()) if call.block.inside(loops[0])]
        # A backward inside the branch is another thing: the generator of a GAN, trained every n-th step.
        if not backwards or any(call.block.inside(branch) for call in backwards):
            continue
        index, every, offset, alone = found
        guards.append(Guard(step, branch.node.test, index, every, offset, branch, loops[0], alone))
    return guards


def guard_index_nodes(facts: Facts) -> set[ast.Name]:
    """The index names of all guards: an undefined one has its own rule."""
    return {guard.index for guard in find_guards(facts)}


def _modulo(test: ast.expr) -> tuple[ast.Name, ast.expr, int, bool] | None:
    alone = True
    if isinstance(test, ast.BoolOp):
        alone = isinstance(test.op, ast.And)
        tests = [value for value in test.values if _modulo(value)]
        if not tests:
            return None
        test = tests[0]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        left: ast.expr = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        left, right = test.left, test.comparators[0]
        if not (isinstance(right, ast.Constant) and right.value == 0):
            return None
    else:
        return None
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mod):
        return None
    counter = left.left
    if isinstance(counter, ast.Name):
        return counter, left.right, 0, alone
    if isinstance(counter, ast.BinOp) and isinstance(counter.op, ast.Add):
        parts = (counter.left, counter.right)
        names = [part for part in parts if isinstance(part, ast.Name)]
        numbers = [
            part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, int)
        ]
        if len(names) == 1 and len(numbers) == 1:
            return names[0], left.right, numbers[0], alone
    return None
