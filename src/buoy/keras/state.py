"""What Keras and TensorFlow objects hold, by stable names, on its way to a checkpoint and back."""

from __future__ import annotations

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


def owns(value: object) -> bool:
    """Whether this is Keras's or TensorFlow's to save; loads neither."""
    return type(value).__module__.partition(".")[0] in ("keras", "tensorflow") or any(
        base.__module__.partition(".")[0] in ("keras", "tensorflow") for base in type(value).__mro__[1:-1]
    )


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
    """A stored tensor as a numpy array over the file's memory; assigning it copies."""
    import ml_dtypes
    import numpy

    word = next(name for name, known in _WORDS.items() if known == stored.dtype)
    dtype = numpy.dtype(getattr(ml_dtypes, word, None) or word)
    return numpy.frombuffer(stored.memory, dtype=dtype).reshape(stored.shape)


def state_of(value: Any) -> dict[str, Any]:
    """Everything this object would need again, as named TensorFlow variables.

    Names do not depend on how many layers this process made before: `dense_7` of a notebook's second try is
    `dense` here, as it was in the first.
    """
    return _components(_named(_variables(value)))


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
    for name, variable in here.items():
        variable.assign(stored[name])


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


def _is_variable(value: object) -> bool:
    import tensorflow as tf

    return isinstance(value, tf.Variable) or (hasattr(value, "_value") and hasattr(value, "path"))


def _once(variables: Iterable[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    for variable in variables:
        seen.setdefault(id(variable), variable)
    return list(seen.values())


def _named(variables: list[Any]) -> dict[str, Any]:
    """Each variable under its path, whose automatic numbers are counted anew in order of appearance."""
    numbers: dict[str, dict[str, int]] = {}
    named: dict[str, Any] = {}
    for variable in variables:
        path = str(getattr(variable, "path", None) or variable.name.partition(":")[0])
        parts = []
        for part in path.split("/"):
            base = re.sub(r"_\d+$", "", part)
            number = numbers.setdefault(base, {}).setdefault(part, len(numbers[base]))
            parts.append(f"{base}_{number}" if number else base)
        name, count = "/".join(parts), 1
        while name in named:
            count += 1
            name = f"{'/'.join(parts)}~{count}"
        named[name] = variable
    return named


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
