"""BY102: a name that nothing defines. A fresh run of the file or notebook stops there."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.accumulation import guard_index_nodes
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule, Severity
from buoy.lint.names import Undefined, has_placeholder, import_fix, undefined_names
from buoy.lint.target import Target
from buoy.lint.timing import timing_of

RULE = Rule("BY102", "undefined-name", "a name is used that nothing defines")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Undefined names that are reached before or during training."""
    owned = guard_index_nodes(facts)
    entries = [entry for entry in undefined_names(facts) if entry.node not in owned]
    pieces = [entry for entry in entries if entry.piece]
    if pieces:
        yield _piece(pieces, facts)
    for entry in entries:
        if not entry.piece and timing_of(facts).moment(entry.block, entry.node.lineno).when != "after":
            yield describe(entry, facts, "")


def _piece(entries: list[Undefined], facts: Facts) -> Finding:
    """One note for a script that imports nothing: it may be a part of another program."""
    names = ", ".join(f"`{entry.name}`" for entry in entries[:3]) + (", ..." if len(entries) > 3 else "")
    what = (
        f"{len(entries)} names that it does not define"
        if len(entries) > 1
        else "a name that it does not define"
    )
    message = f"this script imports nothing and uses {what} ({names}): NameError, unless another program takes it in"
    hint = "import or define them, or leave it if a notebook reads this file with `%load`"
    return Finding(facts.document.span(entries[0].node), "note", message, hint)


def describe(entry: Undefined, facts: Facts, when: str) -> Finding:
    """The finding for a name, early or late."""
    fix = import_fix(entry, facts)
    function = entry.block.function()
    severity: Severity = "error"
    reached = "" if function.kind == "module" else " when this line is reached"
    if has_placeholder(facts):
        severity = "note"
    elif (
        function.kind == "function"
        and function.scope.name not in facts.calls
        and not _is_method(function.scope.parent)
    ):
        severity = "warning"
        reached = f" if `{function.scope.name}` is called"
    late = f", {when}" if when else ""
    more = f" ({entry.uses} uses)" if entry.uses > 1 else ""
    if entry.deleted is not None:
        line = facts.document.place(entry.deleted.lineno, 0)
        place = f"cell {line.cell}, line {line.line}" if line.cell is not None else f"line {line.line}"
        failure = "NameError" if function.kind == "module" else "UnboundLocalError"
        message = f"`{entry.name}` is gone{more}: `del` in {place} took it away; {failure}{reached}{late}"
        return Finding(
            facts.document.span(entry.node),
            severity,
            message,
            f"move the `del` behind the last use of `{entry.name}`",
        )
    place = (
        "no earlier or later cell defines it"
        if facts.document.kind == "notebook"
        else "nothing in the file defines or imports it"
    )
    message = f"`{entry.name}` is not defined{more}: {place}; NameError{reached}{late}"
    hint = fix.title if fix else f"define or import `{entry.name}` before this line, or correct its spelling"
    return Finding(facts.document.span(entry.node), severity, message, hint, fix)


def _is_method(scope: object) -> bool:
    return getattr(scope, "kind", "") == "class"
