"""BatchNormalization: the one common layer whose result for a sample depends on the other samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from buoy.microbatch.errors import CannotSplit


def learning(model: Any) -> list[Any]:
    """The BatchNormalization layers that use the batch's own statistics; frozen ones do not."""
    layers = model._flatten_layers()
    return [
        layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def refuse(model: Any, inexact: tuple[str, ...]) -> None:
    """Say that this model cannot be split, unless its user accepts statistics per micro-batch."""
    found = [layer.name for layer in learning(model)]
    if not found or "batchnorm" in inexact:
        return
    names = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    raise CannotSplit(
        "BatchNormalization cannot be split into micro-batches with the same result",
        received=f"{len(found)} of them in training mode: {names}",
        expected="layers that treat each sample by itself",
        hint="GroupNormalization or LayerNormalization instead, a smaller batch_size, frozen layers "
             '(trainable = False), or inexact=("batchnorm",) to accept statistics per micro-batch',
    )  # fmt: skip


@contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """Within it these layers use their stored statistics, so that everything else can be compared."""
    layers = learning(model)
    for layer in layers:
        object.__setattr__(layer, "call", _resting(layer.call))
    try:
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "call")


def _resting(original: Any) -> Any:
    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return original(inputs, training=False, mask=mask)

    return call
