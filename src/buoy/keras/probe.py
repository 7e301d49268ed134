"""Is the sum over micro-batches the whole batch's gradient, for this model and this loss? Tried on a few samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy
import tensorflow as tf

SAMPLES = 5
"""Cut into 2 and 3: an even cut cannot tell a mean from a mean of means."""

_FLOORS = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-2, "bfloat16": 5e-2}
_ORDERS = 4.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a try gave: gradients and the state it would write, as arrays."""

    gradients: list[Any]
    state: list[Any]


Try = Callable[[Any, int, bool, bool], Answer]
"""(data, micro-batches, scalar losses are sums, added losses are sums) -> Answer; writes nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probe can say."""

    scalar_sums: bool
    added_sums: bool
    state_adds_up: bool
    """Whether metrics updated per micro-batch end as those updated once."""
    error: float
    allowed: float

    @property
    def equal(self) -> bool:
        """Whether the gradient is the whole batch's."""
        return self.error <= self.allowed


def probe(attempt: Try, data: Any, reversed_data: Any, dtype: str, unknown: tuple[bool, bool]) -> Finding:
    """Compare whole and split, under each reading of the losses whose reduction cannot be seen."""
    whole = attempt(data, 1, False, False)
    other_order = attempt(reversed_data, 1, False, False)
    floor = _FLOORS.get(dtype, _FLOORS["float32"])
    allowed = max(floor, _ORDERS * distance(whole.gradients, other_order.gradients))
    best: Finding | None = None
    for scalar in (False, True) if unknown[0] else (False,):
        for added in (False, True) if unknown[1] else (False,):
            split = attempt(data, 2, scalar, added)
            error = distance(whole.gradients, split.gradients)
            adds_up = distance(whole.state, split.state) <= max(allowed, floor)
            finding = Finding(scalar, added, adds_up, error, allowed)
            if best is None or finding.error < best.error:
                best = finding
    assert best is not None
    return best


def distance(first: list[Any], second: list[Any]) -> float:
    """The largest difference, relative to each array's size; arrays that are almost nothing count by the whole's."""
    norms = [float(numpy.linalg.norm(numpy.asarray(a, "float64").ravel())) for a in first]
    whole = sum(norm**2 for norm in norms) ** 0.5
    largest = 0.0
    for norm, a, b in zip(norms, first, second, strict=True):
        difference = float(
            numpy.linalg.norm((numpy.asarray(a, "float64") - numpy.asarray(b, "float64")).ravel())
        )
        if not isfinite(difference):
            return inf
        if difference:
            largest = max(largest, difference / max(norm, 1e-3 * whole, 1e-30))
    return largest


def as_arrays(tensors: list[Any]) -> list[Any]:
    """Gradients for comparison: dense, as numpy; none is nothing."""
    return [tf.convert_to_tensor(tensor).numpy() for tensor in tensors if tensor is not None]
