"""BY407, BY801, BY961: retrying inside `except`, a new model in every pass of a loop, float16 without loss scaling.
BY501, BY502, BY503: gradient accumulation that counts wrong, does not divide, or loses the last batches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.constants import number, range_length
from buoy.lint.facts import Block, Call, Facts, dotted_name, literal
from buoy.lint.model import Edit, Finding, Fix, Rule
from buoy.lint.rules.names import undefined_names
from buoy.lint.target import Target
from buoy.lint.training import Guard, find_guards, leaves, makes_keras_model, uses_keras, uses_torch

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
            yield Finding(facts.span(again), "warning", message, hint)


def _about_memory(handler: ast.ExceptHandler, facts: Facts) -> bool:
    if handler.type is None:
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [facts.qualified(kind) or "" for kind in kinds]
    if any(name.endswith("OutOfMemoryError") for name in names):
        return True
    if not any(name in ("RuntimeError", "Exception") for name in names):
        return False
    texts = (literal(node) for statement in handler.body for node in ast.walk(statement))
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
                    facts.span(tape.node),
                    "warning",
                    message,
                    "wrap the optimizer in `keras.optimizers.LossScaleOptimizer` and use `optimizer.scale_loss(loss)`",
                )
                break
    for call in facts.calls.get("Dense", ()):
        if (
            literal(call.keyword("activation")) == "softmax"
            and call.keyword("dtype") is None
            and _is_output(call, facts)
            and _in_force(setters, call.block, call.node.lineno, facts)
        ):
            span = facts.span(call.node)
            fix = Fix("add `dtype='float32'`", (Edit(span.end(before=1), ", dtype='float32'"),), "unsafe")
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
    return bool(literal(value) == "mixed_float16")


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
                and not any(map(leaves, loops))
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
                yield Finding(facts.span(call.node), "warning", message, hint)


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
            facts.span(guard.index),
            "error",
            message,
            hint,
            _enumerate(guard.index.id, guard.loop.node, facts),
        )


def _enumerate(index: str, loop: ast.AST | None, facts: Facts) -> Fix | None:
    if not isinstance(loop, ast.For):
        return None
    target, source = facts.span(loop.target), facts.span(loop.iter)
    names = facts.document.text(target)
    if isinstance(loop.target, ast.Tuple) and not names.startswith("("):
        names = f"({names})"
    edits = (
        Edit(target, f"{index}, {names}"),
        Edit(source.start(), "enumerate("),
        Edit(source.end(), ")"),
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
            facts.span(backward.node),
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
    losses = facts.calls.get("CrossEntropyLoss", ())
    if any(literal(call.keyword("reduction")) == "sum" for call in losses) or any(
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
        yield Finding(facts.span(guard.test), "warning", message, hint)


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
