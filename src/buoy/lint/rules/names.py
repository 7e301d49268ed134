"""BY101, BY102, BY103, BY981: names that nothing defines, or only a later cell, and code that does not parse."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from buoy.lint.facts import Block, Facts, known_without_import, once
from buoy.lint.magics import BARE_COMMANDS
from buoy.lint.model import Edit, Finding, Fix, Rule, Severity, Span
from buoy.lint.sources import Cell, Problem
from buoy.lint.target import Target
from buoy.lint.training import guard_index_nodes, is_guarded, timing_of

_PLACEHOLDER = re.compile(r"^\s*(#.*(\.\.\.|…)|\.\.\.\s*$)", re.MULTILINE)
# What Python 2 had; code for both tests the version first, often in the same expression.
_PYTHON_2 = frozenset(
    {"unicode", "xrange", "unichr", "basestring", "long", "raw_input", "reduce", "file", "execfile", "cmp"}
)
# Imports that nobody writes in another way, so that adding them cannot change the meaning of a program that would fail.
_IMPORTS = {
    name: f"import {name}"
    for name in (
        "os",
        "sys",
        "re",
        "json",
        "math",
        "random",
        "glob",
        "shutil",
        "pickle",
        "copy",
        "time",
        "gc",
        "csv",
        "torch",
        "keras",
        "itertools",
        "collections",
        "functools",
        "subprocess",
        "argparse",
        "logging",
        "warnings",
        "torchvision",
    )
}
_IMPORTS |= {
    "np": "import numpy as np",
    "pd": "import pandas as pd",
    "plt": "import matplotlib.pyplot as plt",
    "tf": "import tensorflow as tf",
    "sns": "import seaborn as sns",
}


@dataclass(slots=True)
class Undefined:
    """A name without a definition: its first use, and how many there are."""

    name: str
    node: ast.Name
    block: Block
    uses: int
    piece: bool = False
    """The script imports nothing: it may be a piece that another program takes in (`%load`, `exec`)."""
    deleted: ast.Delete | None = None
    """The `del` that took the name away; None when nothing ever defined it."""


@once
def undefined_names(facts: Facts) -> list[Undefined]:
    """One entry per undefined name and function; nothing when names may come from where we cannot see."""
    found: dict[tuple[str, int], Undefined] = {}
    if facts.opaque:
        return []
    document = facts.document
    given = _given_from_outside(facts)
    imports_nothing = document.kind == "python" and not facts.imported
    deletions = _deletions(facts)
    for scope in facts.scopes:
        known: dict[str, bool] = {}
        for name, node, block in scope.loads:
            defined = known.get(name)
            if defined is None:
                defined = scope.find(name) is not None or known_without_import(name, document)
                known[name] = defined
            deleted = _deleted_before(name, node, block, deletions, facts) if defined and deletions else None
            if (defined and deleted is None) or is_guarded(block) or name in given:
                continue
            if document.kind == "notebook" and _is_command_line(document.line(node.lineno), given):
                continue
            if facts.ignores and facts.hidden(_rule_of(node, block, facts), node):
                continue
            key = (name, id(block.function()))
            if key in found:
                found[key].uses += 1
            else:
                piece = imports_nothing and block.function().kind == "module" and deleted is None
                found[key] = Undefined(name, node, block, 1, piece, deleted)
    return list(found.values())


def _rule_of(node: ast.Name, block: Block, facts: Facts) -> str:
    """The rule that will speak of this use: a comment must name that one."""
    if node in guard_index_nodes(facts):
        return "BY501"
    return "BY101" if timing_of(facts).moment(block, node.lineno).when == "after" else "BY102"


def _deletions(facts: Facts) -> dict[tuple[str, int], ast.Delete]:
    """`del x` that surely happens: a statement of the module or function itself, not of a branch or loop in it."""
    found: dict[tuple[str, int], ast.Delete] = {}
    for name, statement, block in facts.deleted:
        sure = block.kind in ("module", "function") and not known_without_import(name, facts.document)
        declared = any(name in scope.foreign for scope in facts.scopes)
        if sure and not declared and name in block.scope.bindings:
            found.setdefault((name, id(block)), statement)
    return found


def _deleted_before(
    name: str, node: ast.Name, block: Block, deletions: dict[tuple[str, int], ast.Delete], facts: Facts
) -> ast.Delete | None:
    """The `del` in front of a use, when nothing binds the name again in between."""
    function = block.function()
    statement = deletions.get((name, id(function)))
    # Later lines of the same body only: a function defined further down may have been called before.
    if statement is None or node.lineno <= (statement.end_lineno or statement.lineno):
        return None
    if block.scope.find(name) is not function.scope:
        return None
    again = function.scope.bindings.get(name, ())
    if any(statement.lineno < getattr(binding.node, "lineno", 0) <= node.lineno for binding in again):
        return None
    return statement


def _given_from_outside(facts: Facts) -> set[str]:
    """Names that a host provides: Python 2, Jupyter's configuration, a Spark shell, extensions with their commands."""
    given: set[str] = set()
    if facts.document.path.endswith("_config.py"):
        given |= {"c", "get_config"}
    if (
        "version_info" in facts.attributes
        or facts.attributes.keys() & {"PY2", "PY3"}
        or "PY2" in facts.imports
    ):
        given |= _PYTHON_2
    if "pyspark" in facts.packages:
        given |= {"sc", "spark", "sqlContext"}
    for cell in facts.document.cells:
        for line in cell.shell:
            if line.startswith("%load_ext"):
                given.add(line.split()[-1])
    return given


def _is_command_line(line: str, given: set[str]) -> bool:
    """`watermark -iv` or a lone `ls`: IPython runs it as a command, although it parses as Python."""
    words = line.split()
    return bool(words) and (words[0] in given or (len(words) == 1 and words[0] in BARE_COMMANDS))


def has_placeholder(facts: Facts) -> bool:
    """Whether a Markdown page leaves something out with `# ...`: then a missing name is announced, not forgotten."""
    return facts.document.kind == "markdown" and any(
        _PLACEHOLDER.search(cell.text) for cell in facts.document.cells
    )


def import_fix(entry: Undefined, facts: Facts) -> Fix | None:
    """Add the import that everybody writes for this name, where it is used as a module."""
    line = _IMPORTS.get(entry.name)
    end = facts.span(entry.node).end_column
    if (
        line is None
        or entry.deleted is not None
        or facts.document.line(entry.node.lineno)[end : end + 1] != "."
    ):
        return None
    cell = facts.document.cell_at(entry.node.lineno)
    if cell.tree is None:
        return None
    originals, plain = cell.lines(), cell.python.split("\n")
    for statement in cell.tree.body:
        index = statement.lineno - cell.first_line
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        # The last: a magic, which must stay first.
        if docstring or future or originals[index] != plain[index]:
            continue
        decorated = getattr(statement, "decorator_list", None)
        first = decorated[0].lineno if decorated else statement.lineno
        written = facts.document.line(first)
        indent = written[: len(written) - len(written.lstrip())]
        column = len(indent) if decorated else facts.span(statement).column
        # Behind a docstring on the same line the import goes there, too; else on a line of its own, as far in.
        text = f"{line}\n{indent}" if column == len(indent) else f"{line}; "
        return Fix(f"add `{line}`", (Edit(Span(first, column, first, column), text),), "safe")
    return None


UNDEFINED_NAME = Rule("BY102", "undefined-name", "a name is used that nothing defines")


def find_undefined_name(facts: Facts, target: Target) -> Iterator[Finding]:
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
    return Finding(facts.span(entries[0].node), "note", message, hint)


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
            facts.span(entry.node),
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
    return Finding(facts.span(entry.node), severity, message, hint, fix)


def _is_method(scope: object) -> bool:
    return getattr(scope, "kind", "") == "class"


UNDEFINED_NAME_LATE = Rule(
    "BY101", "undefined-name-after-training", "a name is used after training that nothing defines"
)


def find_undefined_name_late(facts: Facts, target: Target) -> Iterator[Finding]:
    """Undefined names that are reached after training."""
    for entry in undefined_names(facts):
        moment = timing_of(facts).moment(entry.block, entry.node.lineno)
        if moment.when == "after" and not entry.piece:
            yield describe(entry, facts, moment.words)


LATER_CELL = Rule(
    "BY103", "defined-in-later-cell", "a cell needs a name that only a later cell defines", default=False
)


def find_later_cell(facts: Facts, target: Target) -> Iterator[Finding]:
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
            facts.span(node),
            "warning",
            message,
            f"move the definition from cell {there.number} above this cell",
        )


SYNTAX = Rule("BY981", "does-not-parse", "a cell or script is not valid Python")

_HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Syntax that came later than the oldest Python buoy runs on: (release, line, the parser's words).
_NEWER = (
    (
        (3, 12),
        re.compile(r"^\s*(async\s+)?(def|class)\s+\w+\s*\[|^\s*type\s+\w+\s*(\[.*\])?\s*="),
        re.compile(""),
    ),
    (
        (3, 12),
        re.compile(r"\b(f|fr|rf)[\"']", re.IGNORECASE),
        re.compile("expecting '}'|backslash|'#'|unterminated|unmatched|nested too deeply"),
    ),
    ((3, 14), re.compile(r"\b(t|tr|rt)[\"']", re.IGNORECASE), re.compile("")),
    ((3, 14), re.compile(r"^\s*except\s+[A-Z][\w.]*(\s*,\s*[A-Z][\w.]*)+\s*:"), re.compile("")),
)


def find_syntax(facts: Facts, target: Target) -> Iterator[Finding]:
    """Every cell with a syntax error; what other cells hold is checked all the same."""
    for cell in facts.document.cells:
        problem = cell.problem
        if problem is None or problem.unread:
            continue
        column = min(problem.column, len(facts.document.line(problem.line)))
        what = (
            "this cell"
            if facts.document.kind == "notebook"
            else "this code"
            if facts.document.kind == "markdown"
            else "this file"
        )
        message = f"{what} does not parse in Python {_HERE}: {problem.message}"
        severity: Severity = "error" if facts.document.kind != "markdown" else "warning"
        hint = _hint(cell, problem.line - cell.first_line)
        newer = _needs(cell, problem)
        if newer is not None:
            severity = "note"
            message = f"Python {_HERE}, which runs buoy, cannot read {what} ({problem.message})"
            hint = f"this looks like the syntax of Python {newer}: run buoy with that to check it"
        if cell.tree is not None:
            severity, message = (
                "warning",
                "this file holds IPython's `%` or `!` lines: `python` cannot run it",
            )
        yield Finding(
            Span(problem.line, column, problem.line, column),
            severity,
            message,
            hint,
        )


def _needs(cell: Cell, problem: Problem) -> str | None:
    """The Python whose syntax this looks like, when the one that runs buoy is older."""
    line = cell.lines()[problem.line - cell.first_line]
    for release, written, said in _NEWER:
        if sys.version_info[:2] < release and written.search(line) and said.search(problem.message):
            return f"{release[0]}.{release[1]}"
    return None


def _hint(cell: Cell, index: int) -> str:
    lines = cell.lines()
    line = lines[index] if 0 <= index < len(lines) else ""
    if re.match(r"\s*print\s+[^(=]", line) or re.search(r"\bexcept\s+\w+\s*,\s*\w+\s*:", line):
        return "this is Python 2; `2to3` or `print(...)` fixes it"
    if line.lstrip().startswith(("!", "%")):
        return "`!` and `%` lines work in notebooks only: use `subprocess.run([...])` in a script"
    return "fix the syntax; until then nothing in this cell or script can run"
