"""tf.data pipelines: the calls in front of a method, through the variables that hold the data set in between."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from buoy.lint.facts import Call, Facts
from buoy.lint.fold import number

_LONGEST = 40
_FROM_FOLDER = frozenset(
    {
        "keras.utils.image_dataset_from_directory",
        "keras.preprocessing.image_dataset_from_directory",
        "tensorflow.keras.utils.image_dataset_from_directory",
        "tensorflow.keras.preprocessing.image_dataset_from_directory",
    }
)


@dataclass(frozen=True, slots=True)
class Images:
    """What `image_dataset_from_directory` will yield: float32 pixels, in batches."""

    per_image: int
    batch: int | None


def chain(call: Call, facts: Facts) -> Iterator[ast.Call]:
    """The calls that made what `call` is called on, nearest first."""
    node: ast.expr | None = call.receiver
    line = call.node.lineno
    for _ in range(_LONGEST):
        if isinstance(node, ast.Call):
            yield node
            node = node.func.value if isinstance(node.func, ast.Attribute) else None
        elif isinstance(node, ast.Name):
            earlier = [
                binding
                for binding in facts.bindings(node, call.block)
                if binding.block is call.block
                and getattr(binding.node, "lineno", 0) <= line
                and binding.value is not None
                and call.node not in ast.walk(binding.value)
            ]
            if not earlier:
                return
            node, line = earlier[-1].value, getattr(earlier[-1].node, "lineno", 0) - 1
        else:
            return


def images_from_folder(call: Call, facts: Facts) -> Images | None:
    """The images at the source of a pipeline, when they come from a folder with a stated size."""
    for earlier in chain(call, facts):
        if facts.qualified(earlier.func) not in _FROM_FOLDER:
            continue
        words = {keyword.arg: keyword.value for keyword in earlier.keywords}
        size = words.get("image_size")
        parts = size.elts if isinstance(size, ast.Tuple | ast.List) else []
        sides = [number(part, facts, call.block) for part in parts] if size is not None else [256, 256]
        if len(sides) != 2 or not all(sides):
            return None
        channels = words.get("color_mode")
        depth = {"grayscale": 1, "rgba": 4}.get(str(getattr(channels, "value", "rgb")), 3)
        batch = number(words["batch_size"], facts, call.block) if "batch_size" in words else 32
        return Images(int(sides[0] or 0) * int(sides[1] or 0) * depth * 4, int(batch) if batch else None)
    return None
