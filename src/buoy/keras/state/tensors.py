"""TensorFlow's variables as the store takes them, stored ones as numpy arrays, and weights as a file of Keras.

Loads no framework by itself: `buoy ckpt export` reads checkpoints without one.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from buoy.checkpoint.encoding import Tensor
from buoy.errors import UsageError

_WORDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def as_tensor(value: object) -> Tensor | None:
    """A TensorFlow variable or tensor as the store wants it; None for everything else."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(value, (tf.Variable, tf.Tensor)):
        return None
    word = _WORDS.get(value.dtype.name)
    if word is None or not value.shape.is_fully_defined():
        return None  # strings and resources: the store refuses them by name

    def copy_into(room: memoryview) -> None:
        room[:] = _bytes_of(value)

    return Tensor(word, tuple(value.shape), copy_into, key=id(value))


def to_tensor(stored: Any) -> Any:
    """A stored tensor as a numpy array with memory of its own."""
    import numpy

    return numpy.frombuffer(stored.read(), dtype=_dtype(stored)).reshape(stored.shape)


class Lent:
    """A stored tensor that is read when it is assigned: of a model that is loaded, one is in memory at a time."""

    def __init__(self, stored: Any) -> None:
        self.shape, self.dtype = stored.shape, _dtype(stored)
        self._stored = stored

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """numpy's own way to ask for it."""
        return to_tensor(self._stored)


def _dtype(stored: Any) -> Any:
    import ml_dtypes
    import numpy

    word = next(name for name, known in _WORDS.items() if known == stored.dtype)
    return numpy.dtype(getattr(ml_dtypes, word, None) or word)


def write_weights_h5(checkpoint: Any, path: str) -> None:
    """The weights of a Guard's checkpoint as a file that `model.load_weights` takes; written whole or not at all."""
    places: dict[str, tuple[str, str]] = {}
    if "training" in checkpoint.names:
        places = checkpoint.value("training", to_tensor).get("weights_file") or {}
    if not places:
        raise UsageError(
            "this checkpoint does not say how Keras would lay its weights out in a file",
            received=str(checkpoint.folder),
            expected="a checkpoint of buoy.keras.Guard",
            hint="export it as .safetensors",
        )
    from importlib import import_module

    import numpy

    h5py = import_module("h5py")  # Keras brings it

    stored = {name: checkpoint.value(name, Lent) for name in {owner for owner, _ in places.values()}}
    beside = f"{path}.part-{os.getpid()}"
    try:
        with h5py.File(beside, "w") as file:
            for place, (owner, name) in places.items():
                value = numpy.asarray(stored[owner][name])
                dataset = file.create_dataset(place, data=value)
                if value.dtype.name == "bfloat16":
                    dataset.attrs["dtype"] = "bfloat16"  # as Keras marks it
        os.replace(beside, path)
    except OSError as error:
        # HDF5's own words hold the number and the name of a file that is nobody's business.
        raise UsageError(
            "cannot write the weights",
            received=f"{path}: {os.strerror(error.errno) if error.errno else error}",
            expected="a file that can be written",
            hint="name another one with `-o`",
        ) from error
    finally:
        if os.path.exists(beside):
            os.remove(beside)


def _bytes_of(value: Any) -> memoryview:
    tensor = value.read_value() if hasattr(value, "read_value") else value
    try:
        return memoryview(tensor).cast("B")  # the tensor's own memory, when it is on the CPU
    except (TypeError, ValueError, NotImplementedError):  # bfloat16, float8, or a tensor elsewhere
        return memoryview(tensor.numpy().reshape(-1).view("uint8"))
