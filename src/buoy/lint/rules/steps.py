"""BY407, BY801, BY961: retrying inside `except`, a new model in every pass of a loop, float16 without loss scaling."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.constants import range_length
from buoy.lint.facts import Block, Call, Facts, dotted_name
from buoy.lint.frameworks import makes_keras_model, uses_keras, uses_torch
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.target import Target

RETRY_IN_HANDLER = Rule("BY407", "retry-inside-except", "an out-of-memory retry runs inside the except block")


def find_retry_in_handler(facts: Facts, target: Target) -> Iterator[Finding]:
    """Handlers of OutOfMemoryError (or RuntimeError about memory) that call again what the `try` called."""
    if not uses_torch(facts):
        return
    for seen in facts.handlers:
        handler = seen.node
        attempt = seen.statement
        if not isinstance(attempt, ast.Try) or not _about_memory(handler, facts):
            continue
        tried = {name for name, call in _calls(attempt.body) if not _harmless(name)}
        own = seen.block.function().scope.name  # `return self.step(batch, again=True)`
        again = next(
            (
                call
                for name, call in _calls(handler.body)
                if name in tried or name.endswith(".backward") or (own and name in (own, f"self.{own}"))
            ),
            None,
        )
        if again is not None:
            message = (
                "this retry runs inside `except`: the exception's traceback still holds the "
                "tensors of the step that ran out of memory"
            )
            hint = "set a flag in the handler and retry after the `try` statement has ended"
            yield Finding(facts.document.span(again), "warning", message, hint)


def _about_memory(handler: ast.ExceptHandler, facts: Facts) -> bool:
    if handler.type is None:
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [facts.qualified(kind) or "" for kind in kinds]
    if any(name.endswith("OutOfMemoryError") for name in names):
        return True
    if not any(name in ("RuntimeError", "Exception") for name in names):
        return False
    texts = (
        node.value
        for statement in handler.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant)
    )
    return any(isinstance(text, str) and "out of memory" in text.lower() for text in texts)


def _calls(body: list[ast.stmt]) -> list[tuple[str, ast.Call]]:
    found = []
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (name := dotted_name(node.func)):
                found.append((name, node))
    return found


def _harmless(name: str) -> bool:
    """Calls that hold no graph: printing, clearing, moving on."""
    tail = name.rpartition(".")[2]
    return tail in {
        "print",
        "zero_grad",
        "empty_cache",
        "collect",
        "info",
        "warning",
        "warn",
        "len",
        "range",
        "int",
        "str",
        "float",
        "isinstance",
        "step",
        "update",
        "append",
        "time",
        "format",
        "join",
        "cuda",
        "to",
        "eval",
        "train",
        "item",
        "synchronize",
        "get",
        "write",
        "tuple",
        "list",
        "dict",
        "set",
        "min",
        "max",
    }


HALF_PRECISION = Rule(
    "BY961", "half-precision", "mixed_float16 without loss scaling, or with a float16 softmax output"
)

_SETTERS = ("set_global_policy", "set_policy", "set_dtype_policy", "set_experimental_policy")
_SCALING = frozenset({"LossScaleOptimizer", "get_scaled_loss", "scale_loss", "get_unscaled_gradients"})


def find_half_precision(facts: Facts, target: Target) -> Iterator[Finding]:
    """Only where the policy really is set to mixed_float16 (not bfloat16) by a constant."""
    if not uses_keras(facts):
        return
    setters = [call for name in _SETTERS for call in facts.calls.get(name, ()) if _sets_half(call, facts)]
    if not facts.calls.keys() & _SCALING:
        for tape in facts.calls.get("GradientTape", ()):
            if _in_force(setters, tape.block, tape.node.lineno, facts) and any(
                call.block.function() is tape.block.function()
                for call in facts.calls.get("apply_gradients", ())
            ):
                message = (
                    "float16 gradients below 6e-8 become zero, and a GradientTape loop scales "
                    "nothing by itself (only `fit` does)"
                )
                yield Finding(
                    facts.document.span(tape.node),
                    "warning",
                    message,
                    "wrap the optimizer in `keras.optimizers.LossScaleOptimizer` and use `optimizer.scale_loss(loss)`",
                )
                break
    for call in facts.calls.get("Dense", ()):
        activation = call.keyword("activation")
        if (
            isinstance(activation, ast.Constant)
            and activation.value == "softmax"
            and call.keyword("dtype") is None
            and _is_output(call, facts)
            and _in_force(setters, call.block, call.node.lineno, facts)
        ):
            span = facts.document.span(call.node)
            end = Span(span.end_line, span.end_column - 1, span.end_line, span.end_column - 1)
            fix = Fix("add `dtype='float32'`", (Edit(end, ", dtype='float32'"),), "unsafe")
            yield Finding(
                span,
                "warning",
                "this softmax output is float16: its probabilities and the loss lose precision (6e-8 is the smallest)",
                "give the last layer `dtype='float32'`",
                fix,
            )


def _in_force(setters: list[Call], block: Block, line: int, facts: Facts, depth: int = 3) -> bool:
    """Whether the policy was set before this line runs: above it in the same body, or above a call of its function."""
    function = block.function()
    if any(setter.block.function() is function and setter.node.lineno < line for setter in setters):
        return True
    if function.kind != "function" or not setters or depth == 0:
        return False
    return any(
        site.block.function() is not function
        and _in_force(setters, site.block, site.node.lineno, facts, depth - 1)
        for site in facts.calls.get(function.scope.name, ())
    )


def _sets_half(call: Call, facts: Facts) -> bool:
    value = call.node.args[0] if call.node.args else call.keyword("policy")
    if isinstance(value, ast.Name):
        value = facts.single_value(value, call.block)
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    return isinstance(value, ast.Constant) and value.value == "mixed_float16"


def _is_output(call: Call, facts: Facts) -> bool:
    """The last layer of a Sequential list, the last `add`, or a name given to `Model(...)`: the layers
    in between may stay float16.
    """
    for other in [*facts.calls.get("Sequential", ()), *facts.calls.get("Model", ())]:
        for argument in [*other.node.args, *(keyword.value for keyword in other.node.keywords)]:
            if (
                isinstance(argument, ast.List)
                and argument.elts
                and argument.elts[-1] is call.node
                and makes_keras_model(other.node, facts)
            ):
                return True
            if isinstance(argument, ast.Name) and other.tail == "Model":
                values = facts.values(argument, other.block)
                if any(isinstance(value, ast.Call) and value.func is call.node for value in values[-1:]):
                    return True
    added = [other for other in facts.calls.get("add", ()) if call.node in other.node.args]
    if not added:
        return False
    later = [
        other
        for other in facts.calls["add"]
        if other.dotted == added[0].dotted and other.node.lineno > added[0].node.lineno
    ]
    return not any(other.block.function() is added[0].block.function() for other in later)


MODELS_IN_LOOP = Rule("BY801", "models-in-loop", "a Keras model is built and fitted in every pass of a loop")

_FEW = 20


def find_models_in_loop(facts: Facts, target: Target) -> Iterator[Finding]:
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
