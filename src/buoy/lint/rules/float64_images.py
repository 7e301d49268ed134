"""BY302: a float64 buffer for images: twice the bytes of float32, eight times those of the files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.sizes import Allocation, allocations
from buoy.lint.target import Target
from buoy.units import format_bytes

RULE = Rule("BY302", "float64-image-buffer", "images are gathered in an array of 64-bit numbers")

_MAKERS = frozenset({"numpy.zeros", "numpy.ones", "numpy.empty"})
_CHANNELS = (1, 3, 4)
# More images than this are no longer a session's data set: the buffer is then no plausible cause of death.
_PLAUSIBLE_IMAGES = 100_000


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`np.zeros((len(paths), H, W, C))` without a dtype, where fewer than 100,000 images fill the RAM."""
    for item in allocations(facts):
        if (
            item.name not in _MAKERS
            or item.stated_dtype
            or len(item.dims) not in (3, 4)
            or not _counts_files(item, facts)
        ):
            continue
        per_image = item.itemsize
        known = item.known(facts)[1:]
        for value in known:
            per_image *= value or 0
        channels = known[2] if len(known) == 3 else 1
        if (
            not per_image
            or channels not in _CHANNELS
            or target.ram is None
            or target.ram // per_image > _PLAUSIBLE_IMAGES
        ):
            continue
        yield _finding(item, per_image, target.ram, target, facts)


def _counts_files(item: Allocation, facts: Facts) -> bool:
    """Whether the first dimension is a number of items that only the data knows."""
    first: ast.expr | None = item.dims[0]
    if isinstance(first, ast.Name):
        first = facts.single_value(first, item.call.block)
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Name) and first.func.id == "len":
        return "batch" not in ast.unparse(first).lower()
    if (
        isinstance(first, ast.Subscript)
        and isinstance(first.value, ast.Attribute)
        and first.value.attr == "shape"
    ):
        return "batch" not in ast.unparse(first).lower()
    return False


def _finding(item: Allocation, per_image: int, ram: int, target: Target, facts: Facts) -> Finding:
    message = (
        f"{format_bytes(per_image)} per item as float64: {ram // per_image:,} items fill the "
        f"RAM of {target.words}"
    )
    span = facts.document.span(item.call.node)
    module = facts.document.text(facts.document.span(item.call.node.func)).rpartition(".")[0]
    fix = None
    if module:
        edit = Edit(
            Span(span.end_line, span.end_column - 1, span.end_line, span.end_column - 1),
            f", dtype={module}.float32",
        )
        fix = Fix("add `dtype=np.float32`", (edit,), "unsafe")
    return Finding(
        span,
        "warning",
        message,
        "`dtype=np.float32` halves it"
        + ("; `np.uint8` with scaling in the model is an eighth" if len(item.dims) == 4 else ""),
        fix,
    )
