"""What a loss was computed from, and what its function knows by name before it is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from buoy.torch.homes import function_homes
from buoy.torch.undo import tensors_in

_NEAR = 3  # containers in containers in which a tensor is looked for


def nodes_of(loss: torch.Tensor) -> Iterator[Any]:
    """Everything that its backward pass would go through, each once."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def tensors_known_to(loss_fn: Any) -> list[torch.Tensor]:
    """By closure, as globals, or as attributes of its own object."""
    homes = function_homes(loss_fn, set())
    return list(tensors_in([home.read(name) for home in homes for name in home.names()], _NEAR))
