"""BY407: retrying after an out-of-memory error inside `except`: the failed step's tensors are still held there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Facts, dotted_name
from buoy.lint.frameworks import uses_torch
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

RULE = Rule("BY407", "retry-inside-except", "an out-of-memory retry runs inside the except block")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
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
