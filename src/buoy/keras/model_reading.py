"""What can be read of a traced training step: whether it draws random numbers that no checkpoint can hold.

`tf.random.normal` and its like keep their generator inside the operation, where nobody can reach it; a Keras layer
keeps its own in a variable. A step that runs eagerly draws its seeds in Python, and those are saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_HIDDEN = ("RandomUniform", "RandomStandardNormal", "RandomGamma", "RandomPoisson", "RandomShuffle",
           "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")  # fmt: skip
_DEEPEST = 6


def hidden_draws(roots: Iterable[Any]) -> list[str]:
    """The names of such operations in the graphs that can be reached from these functions; sorted, each once."""
    found: set[str] = set()
    for function in _traced(roots):
        for concrete in function._list_all_concrete_functions():
            found.update(hidden_operations(concrete))
    return sorted(found)


def hidden_operations(concrete: Any, more: tuple[str, ...] = ()) -> set[str]:
    """Operations of one graph, and of those inside it, that keep a generator; and others that are asked for."""
    graph = concrete.graph.as_graph_def()
    nodes = [*graph.node, *(op for body in graph.library.function for op in body.node_def)]
    return {op.op for op in nodes if op.op.startswith((*_HIDDEN, *more))}


def _traced(roots: Iterable[Any]) -> list[Any]:
    """The tf.functions inside closures, methods and attributes of these."""
    found: list[Any] = []
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if item is None or id(item) in seen:
                continue
            seen.add(id(item))
            if hasattr(item, "_list_all_concrete_functions"):
                found.append(item)
            below += _inside(item)
        level = below
    return found


def _inside(item: Any) -> list[Any]:
    cells = [cell.cell_contents for cell in getattr(item, "__closure__", None) or () if _filled(cell)]
    parts = [*cells, getattr(item, "__wrapped__", None), getattr(item, "__self__", None)]
    if _is_ours(item):
        parts += vars(item).values()
    if isinstance(item, (list, tuple)):
        parts += item
    elif isinstance(item, dict):
        parts += item.values()
    return [
        part for part in parts if callable(part) or _is_ours(part) or isinstance(part, (list, tuple, dict))
    ]


def _is_ours(item: Any) -> bool:
    return type(item).__module__.startswith("buoy.keras") and hasattr(item, "__dict__")


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
