"""Looks up what the probed table says is gone, and words it with the moment it strikes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from buoy.lint.facts import Block, Facts
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Edit, Fix, Safety, Span
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
    """A removed name and the places where the file uses it, in order."""

    name: str
    library: str
    since: str
    places: list[tuple[ast.AST, Block]]

    @property
    def node(self) -> ast.AST:
        """Where the failure comes first."""
        return self.places[0][0]

    @property
    def block(self) -> Block:
        """The block of the first place."""
        return self.places[0][1]

    def hide(self, code: str, facts: Facts) -> bool:
        """Drop the places that comments hide; False when none is left."""
        self.places = [place for place in self.places if not facts.hidden(code, place[0])]
        return bool(self.places)

    def message(self, facts: Facts) -> str:
        """What happens, and when."""
        table = removed()[self.library]
        failure = "ImportError" if isinstance(self.node, ast.Import | ast.ImportFrom) else "AttributeError"
        if self.name in table.get("raising", ()):
            failure = "it is still there, but only raises RuntimeError"
        tried = table["version"]
        more = f" ({len(self.places)} uses)" if len(self.places) > 1 else ""
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
        if is_guarded(block) or not target.lacks(*names[name], facts):
            continue
        uses.setdefault(name, Use(name, *names[name], [])).places.append((node, block))
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


def drop_argument(keyword: ast.keyword, facts: Facts, safety: Safety) -> Fix | None:
    """Take an argument out with the comma in front of it; only on one line, where that comma is easy to see."""
    span = facts.document.span(keyword)
    before = facts.document.line(span.line)[: span.column].rstrip()
    if span.line != span.end_line or not before.endswith(","):
        return None
    edit = Edit(Span(span.line, len(before) - 1, span.line, span.end_column), "")
    return Fix(f"drop `{keyword.arg}`", (edit,), safety)


def strike(facts: Facts, block: Block, line: int) -> str:
    """`, after 20 epochs of training`: when the failure comes; empty when it comes before."""
    moment = timing_of(facts).moment(block, line)
    return f", {moment.words}" if moment.when == "after" else ""
