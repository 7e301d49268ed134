"""BY303: images of a stated size read into a list and then copied into an array: all of them in memory, twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts, dotted_name
from buoy.lint.fold import number
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target
from buoy.units import format_bytes

RULE = Rule("BY303", "images-in-list", "images are read into a list and copied into an array", default=False)

_READERS = frozenset({"imread", "load_img", "open"})
_PLAUSIBLE_IMAGES = 100_000


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`append` of a resized image in a loop over files, where the list later becomes an array."""
    for call in facts.calls.get("append", ()):
        name = dotted_name(call.receiver) if call.receiver is not None else None
        if (
            name is None
            or len(call.node.args) != 1
            or not call.block.loops()
            or not _becomes_array(name, facts)
        ):
            continue
        size = _image_bytes(call, facts)
        if size is None or target.ram is None or target.ram // (2 * size) > _PLAUSIBLE_IMAGES:
            continue
        message = (
            f"{format_bytes(size)} per image, and twice that while the list is copied into an array: "
            f"{target.ram // (2 * size):,} images fill {target.words}"
        )
        hint = "fill an array made beforehand (`np.empty((n, h, w, 3), np.uint8)`), or read batches with a DataLoader"
        yield Finding(facts.document.span(call.node), "warning", message, hint)


def _becomes_array(name: str, facts: Facts) -> bool:
    calls = facts.called("numpy.array", "numpy.asarray", "numpy.stack")
    return any(call.node.args and dotted_name(call.node.args[0]) == name for call in calls)


def _image_bytes(call: Call, facts: Facts) -> int | None:
    """Height x width x 3 x bytes per number, from the resize that the appended value went through."""
    work: list[tuple[ast.expr, int]] = [(call.node.args[0], 4)]
    pixels, reads, itemsize = None, False, 1
    while work:
        node, depth = work.pop()
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                tail = (dotted_name(part.func) or "?").rpartition(".")[2]
                reads = reads or tail in _READERS
                pixels = pixels or _stated_size(part, tail, call, facts)
                itemsize = 4 if tail == "img_to_array" else itemsize
            elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) and itemsize == 1:
                itemsize = 8  # NumPy divides bytes into 64-bit numbers
            elif isinstance(part, ast.Name) and depth:
                values = [binding for binding in facts.bindings(part, call.block) if binding.block.loops()]
                work += [(binding.value, depth - 1) for binding in values if binding.value is not None]
    return pixels * 3 * itemsize if pixels and reads else None


def _stated_size(node: ast.Call, tail: str, call: Call, facts: Facts) -> int | None:
    shapes = [keyword.value for keyword in node.keywords if keyword.arg in ("target_size", "dsize", "size")]
    if tail == "resize":
        shapes += node.args
    for shape in shapes:
        if isinstance(shape, ast.Tuple) and len(shape.elts) == 2:
            sides = [number(side, facts, call.block) for side in shape.elts]
            if all(sides):
                return int(sides[0] or 0) * int(sides[1] or 0)
    return None
