"""Weights that nobody tracked and that get a gradient: a loss with centres of its own, heads in a list, a prompt.

Their gradients must be set aside and put back like all others, or a comparison and a failed try stay in them.
"""

from __future__ import annotations

from typing import Any

import torch

from buoy.torch.homes import function_homes
from buoy.torch.undo import tensors_in

_NEAR = 3  # containers in containers in which a tensor is looked for


class GradientBeside(Exception):  # noqa: N818 - never leaves the comparison
    """The backward pass would add to these, which are not known yet."""

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        super().__init__()
        self.leaves = leaves


def leaves_beside(loss: torch.Tensor, known: list[torch.Tensor], loss_fn: Any) -> list[torch.Tensor]:
    """What the backward pass of this loss adds to beside the known ones.

    What the loss function makes itself (an input that is told to require a gradient) is gone after it, and left out:
    only parameters count, and tensors that the loss function knows by a name.
    """
    ours = {id(each) for each in known}
    found = [leaf for leaf in _leaves(loss) if id(leaf) not in ours]
    if all(isinstance(leaf, torch.nn.Parameter) for leaf in found):
        return found
    homes = function_homes(loss_fn, set())
    named = {
        id(each) for home in homes for name in home.names() for each in tensors_in(home.read(name), _NEAR)
    }
    return [leaf for leaf in found if isinstance(leaf, torch.nn.Parameter) or id(leaf) in named]


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    waiting, seen, found = [loss.grad_fn], set[Any](), list[torch.Tensor]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
