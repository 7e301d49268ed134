"""What a person's own callback holds, attribute by attribute, on its way to a checkpoint and back."""

from __future__ import annotations

import dis
import marshal
import zlib
from collections import deque
from functools import cache
from types import FunctionType
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy.checkpoint.state import encode
from buoy.checkpoint.values import Container, leaves
from buoy.errors import BuoyError
from buoy.keras import rng, state

_KERAS_ATTRIBUTES = ("model", "_model", "params", "validation_data")
# Keys of dicts that stand for what is no plain value.
_GENERATOR = "buoy.generator"
_VARIABLES = "buoy.variables"
_TENSOR = "buoy.tensor"
_CONTAINERS = (dict, list, set, deque)
_PLAIN = (int, float, bool, str, bytes, type(None))
_NUMBERS = frozenset((int, float, bool, type(None)))


def attributes(callback: Any) -> dict[str, Any]:
    """Its plain attributes, copied, where its generators are, and the variables that are its own."""
    kind: Any = type(callback)
    theirs, held = written_by_keras(kind), _held_by_model(callback)
    found: dict[str, Any] = {}
    for name, value in vars(callback).items():
        if name in _KERAS_ATTRIBUTES or name in theirs:
            continue
        if _are_numbers(
            value
        ):  # a loss per batch, say: a million of them take seconds to be looked at one by one
            found[name] = value.copy() if hasattr(value, "copy") else value
            continue
        try:
            kept = _kept(value, held)
            encode(name, kept, state.as_tensor)
        except (BuoyError, RecursionError, tf.errors.OpError):
            continue  # keys that are objects, texts in variables, bfloat16: it begins anew, the training goes on
        if kept is not None or value is None:
            found[name] = kept
    return found


def _are_numbers(value: Any) -> bool:
    return type(value) in (list, deque, set, tuple, frozenset) and _NUMBERS.issuperset(map(type, value))


def _kept(value: Any, held: set[int]) -> Any:
    """What stands for it in a checkpoint; None: nothing can."""
    if (generator := rng.generator_state(value)) is not None:
        return {_GENERATOR: generator}
    if variables := _own_variables(value, held):
        return {_VARIABLES: variables}
    others = [leaf for leaf in leaves(value) if not _is_plain(leaf)]
    if not others:
        return _copied(value)
    if all(rng.generator_state(leaf) is not None for leaf in others):
        return _copied(_described(value))
    return None


def frozen(value: Any) -> Any:
    """To compare with later: of variables, which go on changing, a checksum."""
    if not _is_marked(value, _VARIABLES):
        return value
    return {
        _VARIABLES: {name: zlib.crc32(each.numpy().tobytes()) for name, each in value[_VARIABLES].items()}
    }


def same(one: Any, other: Any) -> bool:
    """Whether two that `frozen` gave are equal to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        if len(one) == len(other) and _are_numbers(one) and _are_numbers(other):
            return marshal.dumps(list(one), 2) == marshal.dumps(list(other), 2)
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    if hasattr(one, "tobytes"):
        return bool(
            one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        )
    return repr(one) == repr(other)


def give_back(callback: Any, name: str, stored: Any, *, is_live: bool = False) -> str | None:
    """Put a stored attribute back, in place where that can be; what is in the way, in words.

    `is_live`: what the script may have changed since stays as it is.
    """
    now = getattr(callback, name, None)
    if _lacks_generator(now, stored):
        return f"{type(callback).__name__} begins anew with the generators that it had in {name}"
    is_alike = isinstance(now, _CONTAINERS) and type(stored) in _CONTAINERS and isinstance(now, type(stored))
    if _is_marked(stored, _GENERATOR):
        rng.set_generator_state(now, stored[_GENERATOR])
    elif _is_marked(stored, _VARIABLES):
        if is_live:
            return None
        here = _own_variables(now, _held_by_model(callback))
        if problems := state.check(here, stored[_VARIABLES], name):
            return f"{type(callback).__name__} begins anew with what it had in {problems[0]}"
        state.assign(here, stored[_VARIABLES])
    elif not is_live and is_alike and getattr(now, "maxlen", None) == getattr(stored, "maxlen", None):
        _container(now).load(_revived(stored))  # the script may hold the same list
    else:
        setattr(callback, name, _revived(stored))
    return None


@cache
def written_by_keras(kind: type) -> frozenset[str]:
    """Attributes that Keras's own classes among its bases write while they work; those they only make are settings."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "keras":
            for name, function in vars(base).items():
                if isinstance(function, FunctionType) and name != "__init__":
                    found |= {
                        each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"
                    }
    return frozenset(found)


def _held_by_model(callback: Any) -> set[int]:
    """Variables that are saved with the model anyway, by id."""
    model = getattr(callback, "_model", None)
    if model is None:
        return set()
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = optimizer.variables if optimizer is not None else []
    return {id(variable) for variable in (*model.variables, *model.metrics_variables, *of_optimizer)}


def _own_variables(value: Any, held: set[int]) -> dict[str, Any]:
    """The variables of a variable, metric, layer, optimizer, or of a container of nothing else."""
    within = list(leaves(value))
    if not within or not all(map(_has_variables, within)):
        return {}
    variables = [variable for each in within for variable in _variables(each) if id(variable) not in held]
    return state.state_of(variables) if variables else {}


def _has_variables(value: Any) -> bool:
    return isinstance(
        value, (tf.Variable, keras.Variable, keras.Layer, keras.Metric, keras.Optimizer, tf.Module)
    )


def _variables(value: Any) -> list[Any]:
    return [value] if isinstance(value, (tf.Variable, keras.Variable)) else list(value.variables)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if isinstance(value, tf.Tensor):
        return hasattr(value, "numpy") and value.dtype != tf.string
    return kind.__module__ == "numpy" and getattr(value, "dtype", numpy.dtype("O")).kind in "biuf"


def _container(value: Any) -> Container:
    return Container(value, rng.generator_state, rng.set_generator_state)


def _described(value: Any) -> Any:
    return _container(value).state() if isinstance(value, _CONTAINERS) else value


def _copied(value: Any) -> Any:
    """The callback goes on changing what it has."""
    if type(value) in _PLAIN:  # first: asking TensorFlow whether it is a tensor takes long, a million times
        return value
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque(map(_copied, value), value.maxlen)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_copied, value))
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(map(_copied, value))
    if isinstance(value, tf.Tensor):
        return {_TENSOR: value.numpy()}
    return value.copy() if isinstance(value, numpy.ndarray) else value


def _revived(stored: Any) -> Any:
    """Copied, with tensors in place of what stands for them."""
    if _is_marked(stored, _TENSOR):
        return tf.constant(stored[_TENSOR])
    if isinstance(stored, dict):
        return {key: _revived(item) for key, item in stored.items()}
    if isinstance(stored, deque):
        return deque(map(_revived, stored), stored.maxlen)
    if isinstance(stored, tuple) and hasattr(stored, "_make"):
        return stored._make(map(_revived, stored))
    if type(stored) in (list, tuple):
        return type(stored)(map(_revived, stored))
    return _copied(stored)


def _lacks_generator(now: Any, stored: Any) -> bool:
    """Whether a generator was saved in a place where there is none now."""
    if _is_marked(stored, _GENERATOR):
        return rng.generator_state(now) is None
    if isinstance(stored, dict):
        return any(
            _lacks_generator(now.get(key) if isinstance(now, dict) else None, each)
            for key, each in stored.items()
        )
    if isinstance(stored, (list, tuple, deque)):
        was = list(now) if isinstance(now, (list, tuple, deque)) else []
        return any(
            _lacks_generator(was[place] if place < len(was) else None, each)
            for place, each in enumerate(stored)
        )
    return False


def _is_marked(value: Any, mark: str) -> bool:
    return isinstance(value, dict) and set(value) == {mark}
