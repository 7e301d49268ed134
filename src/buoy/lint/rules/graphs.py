"""BY401, BY402, BY403, BY404: autograd graphs of torch that are kept, built for nothing, or used after a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from buoy.lint.facts import Block, Call, Facts, Seen, dotted_name, literal, once
from buoy.lint.model import Edit, Finding, Fix, Rule, Severity
from buoy.lint.target import Target
from buoy.lint.training import leaves, scope_key, timing_of, uses_torch, without_gradients

_BACKWARD = ("backward", "grad", "requires_grad_", "manual_backward", "attack", "perturb")


@dataclass(slots=True)
class EvalLoop:
    """`model.eval()` and then a loop that calls the model, with the gradients on."""

    switch: Call
    loop: Block
    call: Call


@once
def eval_loops(facts: Facts) -> list[EvalLoop]:
    """Every such loop; nothing where gradients are off, needed or frozen."""
    if not uses_torch(facts) or "eval" not in facts.calls or _gradients_off_everywhere(facts):
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
    return bool(call.node.args) and literal(call.node.args[0]) is False


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
    return not leaves(loop)


def _gradients_off_everywhere(facts: Facts) -> bool:
    if any(
        literal(binding.value) is False
        for name, bindings in facts.fields.items()
        if name.endswith("requires_grad")
        for binding in bindings
    ):
        return True
    return any(call.keyword("volatile") is not None for call in facts.calls.get("Variable", ()))


KEPT_GRAPH = Rule("BY401", "kept-graph", "a counter or list keeps the autograd graph of every step")

_CUTS = frozenset({"item", "detach", "data", "tolist", "cpu_item", "numpy"})
_NUMBERS = frozenset({"float", "int", "str", "len", "round"})


def find_kept_graph(facts: Facts, target: Target) -> Iterator[Finding]:
    """Where a loss that gets `backward()` in a loop is added or appended to something made outside that loop."""
    if not uses_torch(facts) or "backward" not in facts.calls:
        return
    losses = _losses(facts)
    for seen in facts.additions:
        node = seen.node
        if isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name | ast.Attribute):
            yield from _judge(node.value, node.target, seen, losses, facts)
    for call in facts.calls.get("append", ()):
        if call.receiver is not None and len(call.node.args) == 1 and dotted_name(call.receiver):
            kept = call.node.args[0]
            for value in kept.elts if isinstance(kept, ast.Tuple | ast.List) else (kept,):
                yield from _judge(value, call.receiver, call, losses, facts)


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
    value: ast.expr, keeper: ast.expr, place: Seen | Call, losses: list[tuple[str, Block]], facts: Facts
) -> Iterator[Finding]:
    """Whether a loss that is kept here (added with `+=`, else appended) keeps its graph."""
    block, adds = place.block, isinstance(place, Seen)
    loss, name = _root(value), dotted_name(keeper)
    loop = next((loop for other, loop in losses if other == loss and block.inside(loop)), None)
    if loop is None or loss is None or name is None or any(name == other for other, _ in losses):
        return
    if without_gradients(block, facts) or _cut_before(loss, block, loop, facts):
        return
    bindings = [binding for binding in facts.bindings(keeper, block) if binding.how != "augmented"]
    if (
        any(binding.block.inside(loop) for binding in bindings)
        or _emptied(name, loop, facts)
        or _feeds_backward(name, facts)
    ):
        return
    if adds and any(binding.how == "argument" for binding in bindings):
        return  # the caller's number: `total += loss` rebinds a local name and is gone with it
    across = (
        len(block.loops()) > 1 and bool(bindings) and not any(binding.block.loops() for binding in bindings)
    )
    message = (
        f"`{name}` {'adds up' if adds else 'collects'} the loss with its autograd graph, "
        f"{'across all epochs' if across else 'for the whole loop'}: host RAM grows by about 456 bytes per graph node "
        "and step (500 nodes: 11 GiB in 50,000 steps)"
    )
    severity: Severity = "error" if across and timing_of(facts).is_training_loop(loop) else "warning"
    hint = "keep the number: `loss.item()`, or `loss.detach()`"
    yield Finding(facts.span(place.node), severity, message, hint, _fix(value, name, facts))


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
        name = _root(call.receiver)
        scope = call.block.scope.find(name) if name else None
        made = [binding.value for binding in scope.bindings[name]] if scope and name else []
        for node in (call.receiver, *call.node.args, *made):
            if node is not None and any(dotted_name(part) == keeper for part in ast.walk(node)):
                return True
    return False


def _fix(value: ast.expr, keeper: str, facts: Facts) -> Fix | None:
    inner = value
    while isinstance(inner, ast.BinOp):
        inner = inner.left if _root(inner.left) else inner.right
    if not isinstance(inner, ast.Name):
        return None
    span = facts.span(inner)
    # `.detach()` and not `.item()`: it stays a tensor, so later uses of the sum still work (a backward apart).
    return Fix(
        "add `.detach()`",
        (Edit(span.end(), ".detach()"),),
        "unsafe" if any(_root(call.receiver) == keeper for call in facts.calls["backward"]) else "safe",
    )


KEPT_OUTPUTS = Rule(
    "BY402", "kept-outputs", "outputs are gathered without detach: each keeps its batch's activations"
)

_LEAVES_GRAPH = frozenset(
    {"item", "detach", "data", "tolist", "numpy", "argmax", "argsort", "round", "bool", "int", "long"}
)


def find_kept_outputs(facts: Facts, target: Target) -> Iterator[Finding]:
    """Appends of the model's output, in an evaluation loop that runs with gradients."""
    for loop in eval_loops(facts):
        for kept in keeping(loop, facts):
            span = facts.span(kept.node.args[0])
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
                Fix("add `.detach().cpu()`", (Edit(span.end(), ".detach().cpu()"),), "unsafe"),
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
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr not in _LEAVES_GRAPH
    ):
        if node.func.attr in ("squeeze", "cpu", "view", "reshape", "flatten", "float", "softmax", "sigmoid"):
            return _on_graph(node.func.value, call, loop, depth, facts)
        return (
            (facts.qualified(node.func) or "") in ("torch.sigmoid", "torch.softmax")
            and bool(node.args)
            and _on_graph(node.args[0], call, loop, depth, facts)
        )
    return False


EVAL_WITH_GRADIENTS = Rule("BY403", "eval-with-gradients", "an evaluation loop runs without torch.no_grad()")


def find_eval_with_gradients(facts: Facts, target: Target) -> Iterator[Finding]:
    """Evaluation loops with gradients on; where outputs are kept as well, BY402 says so instead."""
    for loop in eval_loops(facts):
        if keeping(loop, facts):
            continue
        name = facts.text(loop.call.node.func)
        message = (
            f"`{name}.eval()` does not turn gradients off: each batch here stores the activations "
            "for a backward that never comes"
        )
        yield Finding(
            facts.span(loop.call.node),
            "warning",
            message,
            "put `with torch.no_grad():` (or `torch.inference_mode()`) around this loop",
        )


STEPPED_GRAPH = Rule(
    "BY404", "backward-after-step", "backward through a graph whose weights were already changed by step()"
)

_DETACHES = frozenset({"detach", "item", "data", "detach_", "no_grad"})


def find_stepped_graph(facts: Facts, target: Target) -> Iterator[Finding]:
    """`a.backward(retain_graph=True)`, `opt.step()`, `b.backward()` in one body, where b goes through
    the stepped model's output.
    """
    if not uses_torch(facts):
        return
    for first in facts.calls.get("backward", ()):
        if literal(first.keyword("retain_graph")) is not True or not first.block.loops():
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
                    f"call both `backward` first and step afterwards, or compute `{shared}` again; "
                    f"`{shared}.detach()` if its gradient is not wanted"
                )
                yield Finding(facts.span(second.node), "error", message, hint)


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
    if isinstance(node, ast.Attribute) and node.attr in _DETACHES:
        return set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DETACHES:
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}
