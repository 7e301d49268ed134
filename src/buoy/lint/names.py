"""Names that nothing defines: shared by the rules about them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from buoy.lint.facts import Block, Facts, known_without_import
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Edit, Fix, Span

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
    # A script without a single import is a fragment (`%load` in a notebook, `exec`): its names come with the
    # place it is put.
    fragment = document.kind == "python" and not facts.imported and document.path != "-"
    for scope in facts.scopes:
        known: dict[str, bool] = {}
        for name, node, block in scope.loads:
            defined = known.get(name)
            if defined is None:
                defined = scope.find(name) is not None or known_without_import(name, document)
                known[name] = defined
            if defined or is_guarded(block) or (fragment and block.function().kind == "module"):
                continue
            if name in given or (
                document.kind == "notebook" and _is_command_line(document.line(node.lineno), given)
            ):
                continue
            key = (name, id(block.function()))
            if key in found:
                found[key].uses += 1
            else:
                found[key] = Undefined(name, node, block, 1)
    return list(found.values())


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
    if line is None or facts.document.line(entry.node.lineno)[end : end + 1] != ".":
        return None
    cell = facts.document.cell_at(entry.node.lineno)
    if cell.tree is None:
        return None
    originals, plain = cell.lines(), cell.python.split("\n")
    for statement in cell.tree.body:
        index = statement.lineno - cell.first_line
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        decorated = getattr(statement, "decorator_list", None)
        first = decorated[0].lineno if decorated else statement.lineno
        if (
            docstring or future or originals[index] != plain[index]
        ):  # the last: a magic, which must stay first
            continue
        return Fix(f"add `{line}`", (Edit(Span(first, 0, first, 0), line + "\n"),), "safe")
    return None
