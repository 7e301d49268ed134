"""What Keras and TensorFlow objects hold, by stable names, on its way to a checkpoint and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import optimizer_weights, raw
from buoy._compat.tensorflow import replicas_of
from buoy.errors import UsageError


def state_of(value: Any) -> dict[str, Any]:
    """Everything this object would need again, as named TensorFlow variables.

    Names do not depend on how many layers this process made before: `dense_7` of a notebook's second try is
    `dense` here, as it was in the first.
    """
    return _components(_named(_variables(value), _trained_by(value)))


def check(here: Mapping[str, Any], stored: Mapping[str, Any], owner: str) -> list[str]:
    """What keeps stored tensors from fitting these variables, in words; empty when all fit. Loads nothing."""
    problems = [f"{owner}.{name} is missing from the checkpoint" for name in here if name not in stored]
    problems += [f"{owner}.{name} is in the checkpoint, but not here" for name in stored if name not in here]
    for name, variable in here.items():
        found = stored.get(name)
        if found is None:
            continue
        if tuple(found.shape) != tuple(variable.shape):
            problems.append(
                f"{owner}.{name} has shape {_shape(variable)}, but {_shape(found)} in the checkpoint"
            )
        elif found.dtype != variable.dtype.as_numpy_dtype:
            problems.append(f"{owner}.{name} is {variable.dtype.name}, but {found.dtype} in the checkpoint")
    return problems


def assign(here: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Load; `check` first, since nothing may be loaded half-way."""
    for name, variable in here.items():
        variable.assign(numpy.asarray(stored[name]))


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
            "an object without variables cannot be saved or restored yet",
            received=f"an unbuilt {type(value).__name__}",
            expected="a built one",
            hint="call the model once on a batch, and `optimizer.build(model.trainable_variables)`",
        )
    return _once(found)


def has_variables(value: Any) -> bool:
    """Whether this is Keras's or TensorFlow's: a variable, or an object that has some, now or when it is built."""
    return _is_variable(value) or hasattr(value, "variables") or _is_variable(getattr(value, "state", None))


def _is_variable(value: object) -> bool:
    return isinstance(value, tf.Variable | keras.Variable)


def _once(variables: Iterable[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    for variable in variables:
        seen.setdefault(id(variable), variable)
    return list(seen.values())


def _trained_by(value: Any) -> list[Any]:
    """What an optimizer trains; the names of its slots contain theirs."""
    return optimizer_weights(value) if hasattr(value, "iterations") else []


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
        for place, replica in enumerate(replicas_of(raw(variable))):
            plain[f"{name}@{place}" if place else name] = replica
    return plain


def _shape(value: Any) -> str:
    return "(" + ", ".join(str(size) for size in value.shape) + ")"
