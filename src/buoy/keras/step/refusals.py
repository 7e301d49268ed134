"""What micro-batches are not made for; and, when not even one sample fits, who owns the memory and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from buoy._compat.keras import layers_of
from buoy.microbatch.errors import CannotSplit, OutOfMemory
from buoy.units import format_bytes

_SHOWN = 3
_SIZES = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def too_big(model: Any, text: str, what: str = "a single sample does") -> OutOfMemory:
    """The error for a step that cannot be split any further, with what owns the peak."""
    weights, gradients = _total(model.weights), _total(model.trainable_weights)
    state = _total(model.optimizer.variables) if getattr(model, "optimizer", None) is not None else 0
    layers = sorted(_outputs(model), key=lambda pair: -pair[1])
    activations = sum(size for _, size in layers)
    owners = {"weights": weights, "gradients": gradients, "optimizer state": state}
    if layers:
        owners["layer outputs of one sample"] = activations
    received = ", ".join(f"{name} {format_bytes(size)}" for name, size in owners.items() if size)
    if layers:
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in layers[:_SHOWN])
        received += f"; the largest outputs: {largest}"
    return OutOfMemory(
        f"{what} not fit into memory: {text}",
        received=received,
        expected="room for a sample besides weights, gradients and optimizer state",
        hint=_hint(weights + gradients + state, activations if layers else None),
    )


def _hint(held: int, activations: int | None) -> str:
    mixed = _mixed_precision()
    optimizer = (
        "an optimizer that holds less: `keras.optimizers.SGD(...)` or `Adafactor(...)` in place of Adam"
    )
    if activations is None:
        remedies = [mixed, optimizer, "smaller samples"]
    elif activations > held:
        remedies = [f"activations fill the memory: {mixed}" if mixed else "activations fill the memory",
                    "smaller or shorter samples"]  # fmt: skip
    else:
        remedies = [
            f"weights fill the memory: {optimizer}",
            "fewer trained weights (`layer.trainable = False`)",
        ]
    return "; ".join(each for each in remedies if each) + "; `buoy plan` compares them in bytes and time"


def _mixed_precision() -> str:
    """The switch, where it is not on."""
    if keras.mixed_precision.global_policy().compute_dtype in ("float16", "bfloat16"):
        return ""
    return (
        'mixed precision, `keras.mixed_precision.set_global_policy("mixed_float16")` before the model is made'
    )


def _outputs(model: Any) -> list[tuple[str, int]]:
    """Bytes of each layer's output for one sample, where the model's own shapes tell."""
    found = []
    for layer in layers_of(model, include_self=False):
        try:
            outputs = keras.tree.flatten(layer.output)
        except (AttributeError, ValueError):
            # Never called, or called several times, or by a model's own `call`.
            continue
        if any(None in tensor.shape[1:] for tensor in outputs):
            continue
        size = sum(math.prod(tensor.shape[1:]) * _SIZES.get(tensor.dtype, 4) for tensor in outputs)
        if size:
            found.append((layer.path, size))
    return found


def _total(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) * _SIZES.get(str(variable.dtype), 4) for variable in variables)


def refuse_backend(what: str) -> None:
    """Everything here computes with TensorFlow."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise CannotSplit(
            f"{what} need Keras on TensorFlow",
            received=f"the {backend} backend",
            expected="KERAS_BACKEND=tensorflow",
            hint="on the torch backend write the loop yourself: `buoy.Run().backward(batch, loss_fn)`",
        )


def refuse_replicas(strategy: Any) -> None:
    """Each replica has a part of the batch, and all of them would have to split it alike."""
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        raise CannotSplit(
            "micro-batches are not made under tf.distribute with more than one replica",
            received=f"{type(strategy).__name__} with {replicas} replicas",
            expected="one replica",
            hint="smaller batches per replica, or one process per device; "
            "without `micro_batch=` a Guard saves and resumes",
        )


def refuse_uneven(data: Any) -> None:
    """Sparse and ragged arrays have no rows that could be taken out."""
    for leaf in keras.tree.flatten(data):
        if type(leaf).__name__ in ("SparseTensor", "RaggedTensor"):  # also read where there is no TensorFlow
            raise CannotSplit(
                "the batch cannot be split: it is not dense",
                received=f"a tf.{type(leaf).__name__} of shape {tuple(leaf.shape)}",
                expected="dense arrays, with one row per sample",
                hint="`tf.sparse.to_dense(x)` or `x.to_tensor()` in the data pipeline; or a smaller batch",
            )


def refuse_stateful(model: Any) -> None:
    """A recurrent layer that carries its state to the next batch has one row of it for each place in the batch."""
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise CannotSplit(
                "the batch cannot be split: a layer keeps a state for each place in it, from batch to batch",
                received=f"{layer.name}: {type(layer).__name__}(stateful=True)",
                expected="layers for which each sample stands alone",
                hint="a smaller batch_size, in the Input and in `fit`; or stateful=False with longer samples",
            )


def without_norms(model: Any, written: Iterable[Any]) -> list[Any]:
    """Variables that are neither seeds nor BatchNorm statistics."""
    layers = (layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization))
    known = {id(variable) for layer in layers for variable in layer.non_trainable_variables}
    return [
        each
        for each in written
        if id(each) not in known and not str(each.path).endswith("seed_generator_state")
    ]


def refuse_state(model: Any, written: Iterable[Any]) -> None:
    """Of anything but metrics, seeds and BatchNorm statistics nobody knows whether a step or a sample moves it."""
    metrics = {id(variable) for variable in model.metrics_variables}
    for variable in without_norms(model, written):
        if id(variable) not in metrics:
            raise CannotSplit(
                "the batch cannot be split: the forward pass writes a variable that may end up "
                "different in micro-batches",
                received=str(variable.path),
                expected="only the optimizer, metrics, seeds and BatchNormalization write during a step",
                hint="write it in a callback (`on_train_batch_end`) or after the step; or use a smaller batch",
            )


# -- BatchNormalization: the one common layer whose result for a sample depends on the others ---------------------


def thawed_norms(model: Any) -> list[Any]:
    """The BatchNormalization layers that would use a batch's own statistics in training; frozen ones do not."""
    norms = (each for each in layers_of(model) if isinstance(each, keras.layers.BatchNormalization))
    return [layer for layer in norms if layer.trainable]


def learning_norms(model: Any, written: Iterable[Any] | None) -> list[Any]:
    """Those that do, by the variables that a training step writes; all that may, as long as these are not known.

    A base that a model of one's own calls with `training=False`, as in fine-tuning, uses and keeps the statistics it
    has. (In a functional model Keras 3 lets it learn all the same.)
    """
    found = thawed_norms(model)
    if written is None or not found:
        return found
    ids = {id(variable) for variable in written}
    return [layer for layer in found if id(layer.moving_mean) in ids]


def refuse_batch_norm(model: Any, inexact: tuple[str, ...], written: Iterable[Any] | None) -> None:
    """Say that this model cannot be split, unless its user accepts statistics per micro-batch."""
    found = [layer.name for layer in learning_norms(model, written)]
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
def norms_at_rest(model: Any) -> Iterator[None]:
    """Within it these layers use their stored statistics, so that everything else can be compared."""
    layers = thawed_norms(model)
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
