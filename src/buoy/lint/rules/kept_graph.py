"""BY401: a counter or list that keeps the whole autograd graph of every step (`total += loss`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Call, Facts, Seen, dotted_name
from buoy.lint.frameworks import uses_torch, without_gradients
from buoy.lint.model import Edit, Finding, Fix, Rule, Severity, Span
from buoy.lint.target import Target
from buoy.lint.timing import timing_of

RULE = Rule("BY401", "kept-graph", "a counter or list keeps the autograd graph of every step")

_CUTS = frozenset({"item", "detach", "data", "tolist", "cpu_item", "numpy"})
_NUMBERS = frozenset({"float", "int", "str", "len", "round"})


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Where a loss that gets `backward()` in a loop is added or appended to something made outside that loop."""
    if not uses_torch(facts) or "backward" not in facts.calls:
        return
    losses = _losses(facts)
    roots = {loss for loss, _ in losses}
    for seen in facts.additions:
        node = seen.node
        if isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name | ast.Attribute):
            yield from _judge(node.value, node.target, seen.block, losses, roots, facts, seen, "+=")
    for call in facts.calls.get("append", ()):
        if call.receiver is not None and len(call.node.args) == 1 and dotted_name(call.receiver):
            kept = call.node.args[0]
            for value in kept.elts if isinstance(kept, ast.Tuple | ast.List) else (kept,):
                yield from _judge(value, call.receiver, call.block, losses, roots, facts, call, "append")


def _losses(facts: Facts) -> list[tuple[str, Block]]:
    """Names whose graph is walked backward, with the innermost loop it happens in."""
    found = []
    for call in facts.calls["backward"]:
        loops = call.block.loops()
        name = _root(call.receiver) or (_root(call.node.args[0]) if call.node.args else None)
        if name and loops and call.keyword("retain_graph") is None:
            found.append((name, loops[0]))
    return found


def _root(node: ast.expr | None) -> str | None:
    """The name under `loss`, `(loss / n)`, `scaler.scale(loss)`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        return _root(node.left) or _root(node.right)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("scale", "mean", "sum")
        and not node.keywords
    ):
        return _root(node.args[0]) if node.args else _root(node.func.value)
    return None


def _judge(
    value: ast.expr,
    keeper: ast.expr,
    block: Block,
    losses: list[tuple[str, Block]],
    roots: set[str],
    facts: Facts,
    where: Seen | Call,
    how: str,
) -> Iterator[Finding]:
    loss = _root(value)
    loop = next((loop for name, loop in losses if name == loss and block.inside(loop)), None)
    keeper_name = dotted_name(keeper)
    if loop is None or loss is None or keeper_name is None or keeper_name in roots or keeper_name == loss:
        return
    if without_gradients(block, facts) or _cut_before(loss, block, loop, facts):
        return
    bindings = [binding for binding in facts.bindings(keeper, block) if binding.how != "augmented"]
    if (
        any(binding.block.inside(loop) for binding in bindings)
        or _emptied(keeper_name, loop, facts)
        or _feeds_backward(keeper_name, facts)
    ):
        return
    if how == "+=" and bindings and any(binding.how == "argument" for binding in bindings):
        return  # the caller's number: `total += loss` rebinds a local name and is gone with it
    across = (
        len(block.loops()) > 1
        and bool(bindings)
        and not any(_in_any_loop(binding.block) for binding in bindings)
    )
    severity: Severity = "error" if across and timing_of(facts).is_training_loop(loop) else "warning"
    yield _finding(value, keeper, keeper_name, severity, facts, where, how, across)


def _in_any_loop(block: Block) -> bool:
    return bool(block.loops())


def _cut_before(loss: str, block: Block, loop: Block, facts: Facts) -> bool:
    """`loss = loss.item()` somewhere in the loop: then the name is a number when it is added."""
    scope = block.scope.find(loss)
    for binding in scope.bindings.get(loss, []) if scope else []:
        if binding.block.inside(loop) and binding.value is not None and _is_cut(binding.value):
            return True
    return False


def _is_cut(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _NUMBERS:
        return True
    node: ast.expr = value
    while True:
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute):
            if node.attr in _CUTS:
                return True
            node = node.value
        else:
            return False


def _emptied(keeper: str, loop: Block, facts: Facts) -> bool:
    """`losses.clear()` or `del losses[:]` in the loop."""
    return any(
        call.dotted == f"{keeper}.{method}" and call.block.inside(loop)
        for method in ("clear", "pop", "popleft")
        for call in facts.calls.get(method, ())
    )


def _feeds_backward(keeper: str, facts: Facts) -> bool:
    """`sum(losses).backward()`, `torch.stack(losses).mean().backward()`: kept because it is needed."""
    for call in facts.calls["backward"]:
        nodes = [call.receiver, *call.node.args]
        for node in nodes:
            if node is not None and any(dotted_name(part) == keeper for part in ast.walk(node)):
                return True
        name = _root(call.receiver) if call.receiver is not None else None
        scope = call.block.scope.find(name) if name else None
        for binding in scope.bindings.get(name or "", []) if scope else []:
            if binding.value is not None and any(
                dotted_name(part) == keeper for part in ast.walk(binding.value)
            ):
                return True
    return False


def _finding(
    value: ast.expr,
    keeper: ast.expr,
    name: str,
    severity: Severity,
    facts: Facts,
    where: Seen | Call,
    how: str,
    across: bool,
) -> Finding:
    kept = "across all epochs" if across else "for the whole loop"
    verb = "adds up" if how == "+=" else "collects"
    message = (
        f"`{name}` {verb} the loss with its autograd graph, {kept}: host RAM grows by about 456 bytes per graph node "
        f"and step (500 nodes: 11 GiB in 50,000 steps)"
    )
    span = facts.document.span(where.node)
    return Finding(
        span,
        severity,
        message,
        "keep the number: `loss.item()`, or `loss.detach()`",
        _fix(value, name, facts),
    )


def _fix(value: ast.expr, keeper: str, facts: Facts) -> Fix | None:
    inner = value
    while isinstance(inner, ast.BinOp):
        inner = inner.left if _root(inner.left) else inner.right
    if not isinstance(inner, ast.Name):
        return None
    span = facts.document.span(inner)
    # `.detach()` and not `.item()`: it stays a tensor, so later uses of the sum still work (a backward apart).
    return Fix(
        "add `.detach()`",
        (Edit(Span(span.end_line, span.end_column, span.end_line, span.end_column), ".detach()"),),
        "unsafe" if any(_root(call.receiver) == keeper for call in facts.calls["backward"]) else "safe",
    )
