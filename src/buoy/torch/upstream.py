"""A batch that was itself computed with gradients: a generator's images, features of an encoder.

Parts and a comparison would go through that graph again and again, which can be done once. So the step ends at the
batch, and what has arrived there goes on when all parts are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from buoy.microbatch.errors import OutOfMemory
from buoy.microbatch.oom import is_oom
from buoy.microbatch.split import rebuilt
from buoy.torch.graph import nodes_of, tensors_known_to


class Upstream:
    """The arrays of a batch that require a gradient, and what stands for them in the step."""

    def __init__(self) -> None:
        self._from: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []

    def end_at(self, batch: object) -> Any:
        """The same batch with leaves."""
        return rebuilt(batch, self._leaf)

    def go_on(self) -> None:
        """The gradients of the batch, to where it came from."""
        if not self.leaves:
            return
        arrived = [
            (one, leaf.grad)
            for one, leaf in zip(self._from, self.leaves, strict=True)
            if leaf.grad is not None
        ]
        try:
            if arrived:
                torch.autograd.backward([one for one, _ in arrived], [gradient for _, gradient in arrived])
        except Exception as error:
            if not is_oom(error):
                raise
            raise OutOfMemory("out of memory in the backward pass of what the batch was computed by",
                              received=str(error).split("\n")[0], expected="room for it beside the step",
                              hint="compute it in the loss function, where it can be cut and done again; the step was "
                                   "not done, weights are as before it") from None  # fmt: skip

    def _leaf(self, array: Any) -> Any:
        if not isinstance(array, torch.Tensor) or not array.requires_grad:
            return array
        leaf = array.detach().requires_grad_(True)
        self._from.append(array)
        self.leaves.append(leaf)
        return leaf


def has_upstream(arrays: list[Any]) -> bool:
    """Whether one of these requires a gradient."""
    return any(isinstance(array, torch.Tensor) and array.requires_grad for array in arrays)


@contextmanager
def as_it_came(arrays: list[Any]) -> Iterator[None]:
    """A loss function may tell its input to require a gradient (R1's penalty): the next call finds it as it was."""
    plain = [array for array in arrays if isinstance(array, torch.Tensor) and not array.requires_grad]
    try:
        yield
    finally:
        for array in plain:
            if array.requires_grad and array.is_leaf:
                array.requires_grad_(False)
                array.grad = None


def arrived(parts: list[Upstream]) -> list[torch.Tensor]:
    """The gradients of a batch's arrays, put together from those of its parts."""
    leaves = zip(*(part.leaves for part in parts), strict=True)
    gradients = [
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in each] for each in leaves
    ]
    return [torch.cat(each) for each in gradients if each[0].dim()]


class FedFromBefore(Exception):  # noqa: N818 - never leaves the comparison
    """A graph from before the loss function would be gone after the comparison, and the step needs it."""


def known_from_before(loss_fn: Any) -> set[Any]:
    """Graphs that it knows by a name before it is called.

    Told by what it knows, not by the order of computation, which each thread counts for itself.
    """
    return {tensor.grad_fn for tensor in tensors_known_to(loss_fn) if tensor.grad_fn is not None}


def is_fed_from_before(loss: torch.Tensor, known: set[Any]) -> bool:
    """Whether its backward pass would go through one of these."""
    return bool(known) and any(node in known for node in nodes_of(loss))
