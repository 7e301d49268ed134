"""BY501: the accumulation test counts with a name that nothing sets."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.accumulation import find_guards
from buoy.lint.facts import Facts
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.names import undefined_names
from buoy.lint.target import Target

RULE = Rule("BY501", "accumulation-index", "the accumulation test uses an index that nothing sets")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
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
