"""What Keras and TensorFlow objects hold, by stable names, on its way to a checkpoint and back."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from buoy.checkpoint.state import Tensor
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


def state_of(value: Any) -> dict[str, Any]:
    """Everything this object would need again, as named TensorFlow variables.

    Names do not depend on how many layers this process made before: `dense_7` of a notebook's second try is
    `dense` here, as it was in the first.
    """
    return _components(_named(_variables(value), _trained_by(value)))


def check(here: Mapping[str, Any], stored: Mapping[str, Any], owner: str) -> list[str]:
    """What keeps stored tensors from fitting these variables, in words; empty when all fit. Loads nothing."""
    problems = [f"{owner}.{name} is not in the checkpoint" for name in here if name not in stored]
    problems += [f"{owner}.{name} is in the checkpoint and not here" for name in stored if name not in here]
    for name, variable in here.items():
        found = stored.get(name)
        if found is None:
            continue
        if tuple(found.shape) != tuple(variable.shape):
            problems.append(f"{owner}.{name} has shape {_shape(variable)}, {_shape(found)} in the checkpoint")
        elif found.dtype != variable.dtype.as_numpy_dtype:
            problems.append(f"{owner}.{name} is {variable.dtype.name}, {found.dtype} in the checkpoint")
    return problems


def assign(here: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Load; `check` first, since nothing may be loaded half-way."""
    import numpy

    for name, variable in here.items():
        variable.assign(numpy.asarray(stored[name]))


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


def _variables(value: Any) -> list[Any]:
    """The variables of a model, layer, optimizer, metric, tf.Module or variable, each once, in a fixed order."""
    if isinstance(value, (list, tuple)):
        return _once(variable for item in value for variable in _variables(item))
    if _is_variable(value):
        return [value]
    found = list(getattr(value, "variables", ()))
    state = getattr(value, "state", None)
    if not found and state is not None and _is_variable(state):
        found = [state]  # a SeedGenerator, a tf.random.Generator
    if not found and not getattr(value, "built", True):
        raise UsageError(
            "what has no variables yet cannot be saved or restored",
            received=f"an unbuilt {type(value).__name__}",
            expected="a built one",
            hint="call the model once on a batch, and `optimizer.build(model.trainable_variables)`",
        )
    return _once(found)


def has_variables(value: Any) -> bool:
    """Whether this is Keras's or TensorFlow's: a variable, or an object that has some, now or when it is built."""
    return _is_variable(value) or hasattr(value, "variables") or _is_variable(getattr(value, "state", None))


def _is_variable(value: object) -> bool:
    import tensorflow as tf

    return isinstance(value, tf.Variable) or (hasattr(value, "_value") and hasattr(value, "path"))


def _once(variables: Iterable[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    for variable in variables:
        seen.setdefault(id(variable), variable)
    return list(seen.values())


def _trained_by(value: Any) -> list[Any]:
    """What an optimizer trains; the names of its slots contain theirs."""
    trained = getattr(value, "_trainable_variables", None)
    return list(trained) if hasattr(value, "iterations") and trained else []


def _named(variables: list[Any], trained: list[Any]) -> dict[str, Any]:
    """Each variable under its path, whose automatic numbers are counted anew in order of appearance."""
    plain = renumbered([_path(variable) for variable in trained])
    slots = sorted(
        ((old.replace("/", "_"), new.replace("/", "_")) for old, new in plain.items()), key=_length
    )
    paths = []
    for variable in variables:
        owner, _, last = _path(variable).rpartition("/")
        old, new = next((pair for pair in slots if last.startswith(pair[0] + "_")), ("", ""))
        paths.append(f"{owner}/{new}{last[len(old) :]}" if owner else _path(variable))
    new_paths = renumbered(paths, slots=bool(slots))
    named: dict[str, Any] = {}
    for path, variable in zip(paths, variables, strict=True):
        name, count = new_paths[path], 1
        while name in named:
            count += 1
            name = f"{new_paths[path]}~{count}"
        named[name] = variable
    return named


def renumbered(paths: list[str], slots: bool = False) -> dict[str, str]:
    """path -> the same with `dense_7` as `dense`, when it is the first of its kind here; slots' names stay."""
    numbers: dict[str, dict[str, int]] = {}
    found = {}
    for path in paths:
        parts = path.split("/")
        for place, part in enumerate(parts[:-1] if slots else parts):
            base = re.sub(r"_\d+$", "", part)
            number = numbers.setdefault(base, {}).setdefault(part, len(numbers[base]))
            parts[place] = f"{base}_{number}" if number else base
        found[path] = "/".join(parts)
    return found


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def _length(pair: tuple[str, str]) -> int:
    return -len(pair[0])


def _components(named: Mapping[str, Any]) -> dict[str, Any]:
    """Plain tf.Variables: a Keras variable's own, and each replica's copy of a distributed one."""
    plain: dict[str, Any] = {}
    for name, variable in named.items():
        value = getattr(variable, "_value", variable)
        replicas = getattr(value, "_values", None)
        if isinstance(replicas, tuple):
            for place, replica in enumerate(replicas):
                plain[f"{name}@{place}" if place else name] = replica
        else:
            plain[name] = value
    return plain


def _bytes_of(value: Any) -> memoryview:
    tensor = value.read_value() if hasattr(value, "read_value") else value
    try:
        return memoryview(tensor).cast("B")  # the tensor's own memory, when it is on the CPU
    except (TypeError, ValueError, NotImplementedError):  # bfloat16, float8, or a tensor elsewhere
        return memoryview(tensor.numpy().reshape(-1).view("uint8"))


def _shape(value: Any) -> str:
    return "(" + ", ".join(str(size) for size in value.shape) + ")"
