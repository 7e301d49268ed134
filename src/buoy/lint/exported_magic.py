"""The code inside a magic that nbconvert wrote as a call: `get_ipython().run_cell_magic('time', '', 'the code')`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from buoy.lint.magics import strip_magics


@dataclass(frozen=True, slots=True)
class MagicCode:
    """What such a call runs."""

    statements: list[ast.stmt] = field(default_factory=list)
    """They stand where the call stands; empty when there is no Python in it."""
    opaque: bool = False
    """It may define anything."""


def read_magic(node: ast.Call) -> MagicCode:
    """Read a call of `run_cell_magic`, `run_line_magic` or `magic` as the notebook's cell was."""
    words = [
        item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
    if len(words) != len(node.args) or not words:
        return MagicCode()
    kind = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    head = "%%" if kind == "run_cell_magic" else "%"
    plain = strip_magics(head + " ".join(words[:2]) + ("\n" + words[2] if len(words) > 2 else ""))
    try:
        tree = ast.parse(plain.python or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return MagicCode(opaque=plain.opaque)
    for inner in ast.walk(tree):
        for place in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(inner, place):
                setattr(inner, place, getattr(node, place))
    return MagicCode(tree.body, plain.opaque)
