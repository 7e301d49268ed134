"""Bytes of arrays, as far as source code states them: shapes and dtypes folded to a number."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from buoy.lint.facts import Call, Facts
from buoy.lint.fold import dimensions, dtype_bytes, number

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


def allocations(facts: Facts) -> list[Allocation]:
    """Every call that makes an array of a stated shape, with its element size; those of unknown dtype are left out."""
    if "allocations" in facts.memo:
        kept: list[Allocation] = facts.memo["allocations"]
        return kept
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
    facts.memo["allocations"] = found
    return found


def _shape(call: Call, style: str) -> list[ast.expr] | None:
    arguments = call.node.args
    if any(isinstance(item, ast.Starred) for item in arguments):
        return None
    if style == "size":
        return dimensions(call.keyword("size") or (arguments[2] if len(arguments) > 2 else None))
    if style == "square":
        return (
            [
                arguments[0],
                arguments[1]
                if len(arguments) > 1 and not isinstance(arguments[1], ast.Constant)
                else arguments[0],
            ]
            if arguments
            else None
        )
    if style == "all" or (style == "either" and len(arguments) > 1):
        return list(arguments)
    return dimensions(call.argument(0, "shape") if style != "either" else call.argument(0, "size"))
