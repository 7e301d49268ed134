"""BatchNormalization: the one common layer whose result for a sample depends on the other samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from buoy._compat.keras import layers_of
from buoy.microbatch.errors import CannotSplit


def thawed(model: Any) -> list[Any]:
    """The BatchNormalization layers that would use a batch's own statistics in training; frozen ones do not."""
    norms = (each for each in layers_of(model) if isinstance(each, keras.layers.BatchNormalization))
    return [layer for layer in norms if layer.trainable]


def learning(model: Any, written: Iterable[Any] | None) -> list[Any]:
    """Those that do, by the variables that a training step writes; all that may, as long as these are not known.

    A base that a model of one's own calls with `training=False`, as in fine-tuning, uses and keeps the statistics it
    has. (In a functional model Keras 3 lets it learn all the same.)
    """
    found = thawed(model)
    if written is None or not found:
        return found
    ids = {id(variable) for variable in written}
    return [layer for layer in found if id(layer.moving_mean) in ids]


def refuse(model: Any, inexact: tuple[str, ...], written: Iterable[Any] | None) -> None:
    """Say that this model cannot be split, unless its user accepts statistics per micro-batch."""
    found = [layer.name for layer in learning(model, written)]
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
    layers = thawed(model)
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
