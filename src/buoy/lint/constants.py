"""Constant folding: the numbers, sizes, path endings and bytes of arrays that source code states without running it."""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from typing import Any

from buoy.lint.facts import Block, Call, Facts, literal, once

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_LARGEST = 10**18
DTYPE_BYTES = {
    "float64": 8,
    "double": 8,
    "int64": 8,
    "long": 8,
    "uint64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "float": 4,
    "int32": 4,
    "uint32": 4,
    "int": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "short": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "bool_": 1,
    "byte": 1,
}


def number(node: ast.AST | None, facts: Facts, block: Block, depth: int = 8) -> int | float | None:
    """The value of an expression of numbers and of names that are assigned once; None when it is unknown.

    A name that is assigned twice, taken as an argument or changed in a loop has no single value.
    """
    if node is None or depth == 0:
        return None
    if isinstance(node, ast.Constant):
        return (
            node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = number(node.operand, facts, block, depth - 1)
        return None if value is None else -value
    if isinstance(node, ast.BinOp):
        return _binary(node, facts, block, depth)
    if isinstance(node, ast.Name | ast.Attribute):
        bindings = facts.bindings(node, block)
        if len(bindings) == 1 and bindings[0].how == "assign":
            return number(bindings[0].value, facts, bindings[0].block, depth - 1)
        return None
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "int"
        and len(node.args) == 1
    ):
        value = number(node.args[0], facts, block, depth - 1)
        return None if value is None else int(value)
    return None


def _binary(node: ast.BinOp, facts: Facts, block: Block, depth: int) -> int | float | None:
    left, right = number(node.left, facts, block, depth - 1), number(node.right, facts, block, depth - 1)
    if left is None or right is None:
        return None
    try:
        if isinstance(node.op, ast.Pow):
            # Bounded on both sides: `10**10**10` in the code we read must not cost us a minute.
            return left**right if abs(left) <= 1e6 and 0 <= right <= 64 else None
        if isinstance(node.op, ast.LShift):
            return int(left) << int(right) if 0 <= right <= 64 else None
        value = _OPERATORS[type(node.op)](left, right)
    except (KeyError, ZeroDivisionError, OverflowError, TypeError, ValueError):
        return None
    return value if abs(value) <= _LARGEST**2 else None


def dimensions(node: ast.AST | None) -> list[ast.expr] | None:
    """The parts of a shape given as a tuple or list; a single expression is one dimension."""
    if isinstance(node, ast.Tuple | ast.List):
        return None if any(isinstance(item, ast.Starred) for item in node.elts) else list(node.elts)
    return [node] if isinstance(node, ast.expr) else None


def dtype_bytes(node: ast.AST | None, facts: Facts, default: int) -> int | None:
    """Bytes per element of a dtype argument; the default when there is none, None when it is not a known one."""
    if node is None:
        return default
    if isinstance(written := literal(node), str):
        return DTYPE_BYTES.get(written)
    name = facts.qualified(node)
    if name is None:
        return None
    if name in ("float", "int"):  # Python's own: NumPy reads them as 64 bits
        return 8
    return DTYPE_BYTES.get(name.rpartition(".")[2])


def ending(node: ast.AST | None, facts: Facts, block: Block, depth: int = 6) -> tuple[str, bool] | None:
    """The last characters of a path expression, and whether that is all of it; None when its end is computed."""
    if node is None or depth == 0:
        return None
    if isinstance(node, ast.Constant):
        return (node.value, True) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        last = literal(node.values[-1]) if node.values else None
        return (last, False) if isinstance(last, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Div):
        found = ending(node.right, facts, block, depth - 1)
        return (found[0], False) if found else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        text = literal(node.left)
        return _after_last(text, "%") if isinstance(text, str) else None
    if isinstance(node, ast.Call):
        return _call_ending(node, facts, block, depth)
    if isinstance(node, ast.Name | ast.Attribute):
        bindings = facts.bindings(node, block)
        if len(bindings) == 1 and bindings[0].how == "assign":
            return ending(bindings[0].value, facts, bindings[0].block, depth - 1)
    return None


def _call_ending(node: ast.Call, facts: Facts, block: Block, depth: int) -> tuple[str, bool] | None:
    if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = literal(node.func.value)
        return _after_last(text, "}") if isinstance(text, str) else None
    name = facts.qualified(node.func) or ""
    if name.endswith(("path.join", "Path", "str")) and node.args:
        found = ending(node.args[-1], facts, block, depth - 1)
        return (found[0], found[1] and len(node.args) == 1) if found else None
    return None


def _after_last(text: str, mark: str) -> tuple[str, bool] | None:
    """What surely stands at the end of a format string."""
    position = text.rfind(mark)
    if position < 0:
        return text, True
    tail = text[position + 1 :]
    if mark == "%":
        tail = tail.lstrip("0123456789.+-# ")[1:]
    return (tail, False) if tail else None


def range_length(node: ast.AST, facts: Facts, block: Block) -> int | None:
    """How often `for _ in range(...)` (or trange, tqdm(range(...))) runs."""
    if not isinstance(node, ast.Call):
        return None
    name = (facts.qualified(node.func) or "").rpartition(".")[2]
    if name in ("tqdm", "enumerate", "trange", "track", "progress_bar") and name != "trange" and node.args:
        return range_length(node.args[0], facts, block)
    if name not in ("range", "trange", "xrange") or not node.args:
        return None
    values = [number(item, facts, block) for item in node.args[:3]]
    if any(value is None for value in values):
        return None
    bounds = [int(value) for value in values if value is not None]
    if len(bounds) == 3 and bounds[2] == 0:
        return None
    return len(range(*bounds))


def epochs_of(call: Call, facts: Facts) -> int | None:
    """The number of epochs a `fit` call states."""
    value = call.keyword("epochs") or call.keyword("nb_epoch") or call.keyword("max_epochs")
    found = number(value, facts, call.block)
    return int(found) if found is not None else None


# qualified name -> (how the shape is given, bytes per element unless a dtype says otherwise)
# first: the first argument is the shape; all: every positional argument is a dimension; size: the keyword `size`.
ALLOCATORS = {
    "numpy.zeros": ("first", 8),
    "numpy.ones": ("first", 8),
    "numpy.empty": ("first", 8),
    "numpy.full": ("first", 8),
    "numpy.random.rand": ("all", 8),
    "numpy.random.randn": ("all", 8),
    "numpy.random.random": ("first", 8),
    "numpy.random.random_sample": ("first", 8),
    "numpy.random.normal": ("size", 8),
    "numpy.random.uniform": ("size", 8),
    "numpy.random.randint": ("size", 8),
    "numpy.random.standard_normal": ("first", 8),
    "numpy.eye": ("square", 8),
    "numpy.identity": ("square", 8),
    "torch.zeros": ("either", 4),
    "torch.ones": ("either", 4),
    "torch.empty": ("either", 4),
    "torch.rand": ("either", 4),
    "torch.randn": ("either", 4),
    "torch.full": ("first", 4),
    "torch.eye": ("square", 4),
    "tensorflow.zeros": ("first", 4),
    "tensorflow.ones": ("first", 4),
    "tensorflow.random.normal": ("first", 4),
    "tensorflow.random.uniform": ("first", 4),
    "tensorflow.eye": ("square", 4),
}
_DTYPE_POSITION = {"numpy.zeros": 1, "numpy.ones": 1, "numpy.empty": 1, "numpy.full": 2}


@dataclass(frozen=True, slots=True)
class Allocation:
    """An array that a call makes."""

    call: Call
    name: str
    dims: list[ast.expr]
    itemsize: int
    stated_dtype: bool

    def known(self, facts: Facts) -> list[int | None]:
        """Each dimension as a number, or None."""
        values = [number(dim, facts, self.call.block) for dim in self.dims]
        return [int(value) if value is not None and value >= 0 else None for value in values]

    def bytes(self, facts: Facts) -> int | None:
        """The whole array; None when a dimension is not known."""
        total = self.itemsize
        for value in self.known(facts):
            if value is None:
                return None
            total *= value
        return total


@once
def allocations(facts: Facts) -> list[Allocation]:
    """Every call that makes an array of a stated shape, with its element size; those of unknown dtype are left out."""
    found = []
    for name, (style, default) in ALLOCATORS.items():
        for call in facts.called(name):
            dims = _shape(call, style)
            dtype = call.keyword("dtype")
            position = _DTYPE_POSITION.get(name)
            if dtype is None and position is not None and len(call.node.args) > position:
                dtype = call.node.args[position]
            itemsize = dtype_bytes(dtype, facts, default)
            if dims and itemsize is not None and not call.has_unknown_keywords:
                found.append(Allocation(call, name, dims, itemsize, dtype is not None))
    return found


def _shape(call: Call, style: str) -> list[ast.expr] | None:
    arguments = call.node.args
    if any(isinstance(item, ast.Starred) for item in arguments):
        return None
    if style == "size":
        return dimensions(call.keyword("size") or (arguments[2] if len(arguments) > 2 else None))
    if style == "square":
        sides = [
            side for side in arguments[:2] if not isinstance(literal(side), str)
        ]  # `identity(n, "int8")`
        sides += [word.value for word in call.node.keywords if word.arg in ("M", "m", "num_columns")]
        return sides * 2 if len(sides) == 1 else sides or None
    if style == "all" or (style == "either" and len(arguments) > 1):
        return list(arguments)
    return dimensions(call.argument(0, "shape") if style != "either" else call.argument(0, "size"))
