"""What micro-batches are not made for, said in words before anything is computed."""

from __future__ import annotations

from typing import Any

import keras

from buoy.microbatch.errors import CannotSplit


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
    """Each replica has a part of the batch, and all of them would have to cut it alike."""
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
                "the batch cannot be cut: it is not dense",
                received=f"a tf.{type(leaf).__name__} of shape {tuple(leaf.shape)}",
                expected="dense arrays, with one row per sample",
                hint="`tf.sparse.to_dense(x)` or `x.to_tensor()` in the data pipeline; or a smaller batch",
            )


def refuse_stateful(model: Any) -> None:
    """A recurrent layer that carries its state to the next batch has one row of it for each place in the batch."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise CannotSplit(
                "the batch cannot be cut: a layer keeps a state for each place in it, from batch to batch",
                received=f"{layer.name}: {type(layer).__name__}(stateful=True)",
                expected="layers for which each sample stands alone",
                hint="a smaller batch_size, in the Input and in `fit`; or stateful=False with longer samples",
            )
