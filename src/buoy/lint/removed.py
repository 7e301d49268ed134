"""Looks up what the probed table says is gone, and words it with the moment it strikes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from buoy.lint.facts import Block, Facts
from buoy.lint.frameworks import is_guarded
from buoy.lint.target import Target, removed
from buoy.lint.timing import timing_of


@cache
def _names(libraries: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], frozenset[str]]:
    """Qualified name to library and release, and the set of last words."""
    names = {
        name: (library, since) for library in libraries for name, since in removed()[library]["names"].items()
    }
    return names, frozenset(name.rpartition(".")[2] for name in names)


def removed_uses(
    facts: Facts, target: Target, libraries: tuple[str, ...]
) -> Iterator[tuple[str, str, str, ast.AST, Block]]:
    """Every import and attribute of a removed name: name, library, release, node, block."""
    names, tails = _names(libraries)
    reported: set[tuple[int, str]] = set()
    for full, statement, block in facts.imported:
        found = _longest(full, names)
        if found and not is_guarded(block) and target.lacks(*names[found], facts):
            reported.add((statement.lineno, found))
            yield found, *names[found], statement, block
    for tail in tails & facts.attributes.keys():
        for seen in facts.attributes[tail]:
            name = facts.qualified(seen.node)
            if (
                name in names
                and _through_import(seen.node, facts)
                and not is_guarded(seen.block)
                and target.lacks(*names[name], facts)
            ):
                key = (seen.node.lineno, name)
                if key not in reported:
                    reported.add(key)
                    yield name, *names[name], seen.node, seen.block


def _longest(full: str, names: dict[str, tuple[str, str]]) -> str | None:
    """The removed name or module that an import goes through."""
    parts = full.split(".")
    return next(
        (name for size in range(2, len(parts) + 1) if (name := ".".join(parts[:size])) in names), None
    )


def _through_import(node: ast.expr, facts: Facts) -> bool:
    """Whether the first word really is the module: not rebound by the file itself."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return (
        isinstance(node, ast.Name)
        and node.id in facts.imports
        and all(binding.how == "import" for binding in facts.module.bindings.get(node.id, ()))
    )


def strike(facts: Facts, block: Block, line: int) -> str:
    """`, after 20 epochs of training`: when the failure comes; empty when it comes before."""
    moment = timing_of(facts).moment(block, line)
    return f", {moment.words}" if moment.when == "after" else ""
