"""Names that nothing defines: shared by the rules about them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from buoy.lint.accumulation import guard_index_nodes
from buoy.lint.facts import Block, Facts, known_without_import
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Edit, Fix, Span
from buoy.lint.timing import timing_of

_PLACEHOLDER = re.compile(r"^\s*(#.*(\.\.\.|…)|\.\.\.\s*$)", re.MULTILINE)
# What Python 2 had; code for both tests the version first, often in the same expression.
_PYTHON_2 = frozenset(
    {"unicode", "xrange", "unichr", "basestring", "long", "raw_input", "reduce", "file", "execfile", "cmp"}
)
_SHELL_WORDS = frozenset({"ls", "pwd", "ll", "whos", "who", "clear", "cls", "hist", "history"})
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


def undefined_names(facts: Facts) -> list[Undefined]:
    """One entry per undefined name and function; nothing when names may come from where we cannot see."""
    if "undefined" not in facts.memo:
        facts.memo["undefined"] = [] if facts.opaque else _undefined(facts)
    entries: list[Undefined] = facts.memo["undefined"]
    return entries


def _undefined(facts: Facts) -> list[Undefined]:
    found: dict[tuple[str, int], Undefined] = {}
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
    return bool(words) and (words[0] in given or (len(words) == 1 and words[0] in _SHELL_WORDS))


def has_placeholder(facts: Facts) -> bool:
    """Whether a Markdown page leaves something out with `# ...`: then a missing name is announced, not forgotten."""
    return facts.document.kind == "markdown" and any(
        _PLACEHOLDER.search(cell.text) for cell in facts.document.cells
    )


def import_fix(entry: Undefined, facts: Facts) -> Fix | None:
    """Add the import that everybody writes for this name, where it is used as a module."""
    line = _IMPORTS.get(entry.name)
    end = facts.document.span(entry.node).end_column
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
        column = len(indent) if decorated else facts.document.span(statement).column
        # Behind a docstring on the same line the import goes there, too; else on a line of its own, as far in.
        text = f"{line}\n{indent}" if column == len(indent) else f"{line}; "
        return Fix(f"add `{line}`", (Edit(Span(first, column, first, column), text),), "safe")
    return None
