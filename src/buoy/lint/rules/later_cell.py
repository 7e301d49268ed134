"""BY103: a cell uses at its top level a name that only a later cell defines."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

RULE = Rule(
    "BY103", "defined-in-later-cell", "a cell needs a name that only a later cell defines", default=False
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Module-level uses before the first definition, in order of cells."""
    if facts.document.kind != "notebook" or facts.opaque:
        return
    reported: set[str] = set()
    for name, node, block in facts.module.loads:
        bindings = facts.module.bindings.get(name, [])
        lines = [getattr(binding.node, "lineno", 0) for binding in bindings]
        if not lines or name in reported or node.lineno >= min(lines) or block.function().kind != "module":
            continue
        here, there = facts.document.cell_at(node.lineno), facts.document.cell_at(min(lines))
        if here is there:
            continue
        reported.add(name)
        message = (
            f"`{name}` is defined only in cell {there.number}, later than this use: NameError "
            "when the cells run from top to bottom"
        )
        yield Finding(
            facts.document.span(node),
            "warning",
            message,
            f"move the definition from cell {there.number} above this cell",
        )
