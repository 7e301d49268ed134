"""BY304: `list(loader)`: every batch of the data set in memory at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.model import Edit, Finding, Fix, Rule
from buoy.lint.target import Target

RULE = Rule("BY304", "loader-to-list", "a loader is turned into a list: all batches in memory at once")

_LOADERS = frozenset(
    {
        "torch.utils.data.DataLoader",
        "torch.utils.data.dataloader.DataLoader",
        "torch_geometric.loader.DataLoader",
    }
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`list(x)` where x was made by DataLoader."""
    for call in facts.calls.get("list", ()):
        if (
            call.dotted != "list"
            or len(call.node.args) != 1
            or not _is_loader(call.node.args[0], call, facts)
        ):
            continue
        name = facts.document.text(facts.document.span(call.node.args[0]))
        outer = next((other for other in facts.calls.get("len", ()) if other.node.args == [call.node]), None)
        if outer is not None:
            fix = Fix(
                f"write `len({name})`", (Edit(facts.document.span(outer.node), f"len({name})"),), "safe"
            )
            message = f"`len(list({name}))` loads and keeps every batch of the data set only to count them"
            yield Finding(
                facts.document.span(outer.node), "warning", message, f"`len({name})` costs nothing", fix
            )
        else:
            message = f"`list({name})` loads every batch of the data set and keeps them all in memory"
            yield Finding(
                facts.document.span(call.node),
                "warning",
                message,
                "loop over the loader, or take what you need with `itertools.islice`",
            )


def _is_loader(node: ast.expr, call: Call, facts: Facts) -> bool:
    values = facts.values(node, call.block)
    if values and all(
        isinstance(value, ast.Call) and facts.qualified(value.func) in _LOADERS for value in values
    ):
        return True
    # A function's argument: its name is all there is to go by.
    bindings = facts.bindings(node, call.block)
    argument = len(bindings) == 1 and bindings[0].how == "argument"
    return (
        argument
        and "torch" in facts.packages
        and isinstance(node, ast.Name)
        and node.id.lower().endswith(("dataloader", "_loader", "_dl"))
    )


def _made_here(node: ast.expr, call: Call, facts: Facts) -> bool:
    values = facts.values(node, call.block)
    return bool(values) and all(
        isinstance(value, ast.Call) and facts.qualified(value.func) in _LOADERS for value in values
    )
