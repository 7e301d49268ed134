"""BY961: mixed_float16 with a custom loop and no loss scaling, or with a float16 softmax at the end."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Call, Facts
from buoy.lint.frameworks import makes_keras_model, uses_keras
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.target import Target

RULE = Rule("BY961", "half-precision", "mixed_float16 without loss scaling, or with a float16 softmax output")

_SETTERS = ("set_global_policy", "set_policy", "set_dtype_policy", "set_experimental_policy")
_SCALING = frozenset({"LossScaleOptimizer", "get_scaled_loss", "scale_loss", "get_unscaled_gradients"})


def find(facts: Facts, target: Target) -> Iterator[Finding]:
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
