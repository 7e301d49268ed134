"""Looks up what the probed table says is gone, and words it with the moment it strikes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
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


@dataclass(slots=True)
class Use:
    """A removed name and where the file uses it."""

    name: str
    library: str
    since: str
    node: ast.AST
    block: Block
    nodes: list[ast.AST]
    """Every place, this one first."""

    def message(self, facts: Facts) -> str:
        """What happens, and when."""
        failure = "ImportError" if isinstance(self.node, ast.Import | ast.ImportFrom) else "AttributeError"
        tried = removed()[self.library]["version"]
        more = f" ({len(self.nodes)} uses)" if len(self.nodes) > 1 else ""
        when = strike(facts, self.block, getattr(self.node, "lineno", 1))
        gone = f"`{self.name}` is gone{more}: not in {self.library} {self.since} nor later (tried in {tried})"
        return f"{gone}; {failure}{when}"


def removed_uses(facts: Facts, target: Target, libraries: tuple[str, ...]) -> list[Use]:
    """Every removed name that is imported or reached, once each."""
    names, tails = _names(libraries)
    places: list[tuple[str, ast.AST, Block]] = []
    for full, statement, block in facts.imported:
        found = _longest(full, names)
        if found:
            places.append((found, statement, block))
    for tail in tails & facts.attributes.keys():
        for seen in facts.attributes[tail]:
            name = facts.qualified(seen.node)
            if name in names and _through_import(seen.node, facts):
                places.append((name, seen.node, seen.block))
    uses: dict[str, Use] = {}
    for name, node, block in sorted(places, key=_order):
        if name in uses:
            uses[name].nodes.append(node)
        elif not is_guarded(block) and target.lacks(*names[name], facts):
            uses[name] = Use(name, *names[name], node, block, [node])
    return list(uses.values())


def _order(place: tuple[str, ast.AST, Block]) -> tuple[int, int, str]:
    name, node, _ = place
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0), name


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
