"""Weights that nobody tracked and that get a gradient: a loss with centres of its own, heads in a list, a prompt.

Their gradients must be set aside and put back like all others, or a comparison and a failed try stay in them.
"""

from __future__ import annotations

from typing import Any

import torch

from buoy.torch.graph import nodes_of, tensors_known_to


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
    leaves = [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]
    found = [leaf for leaf in leaves if id(leaf) not in ours]
    if all(isinstance(leaf, torch.nn.Parameter) for leaf in found):
        return found
    named = {id(each) for each in tensors_known_to(loss_fn)}
    return [leaf for leaf in found if isinstance(leaf, torch.nn.Parameter) or id(leaf) in named]
