"""What callbacks remember between epochs: best values, waits and counters, and the history of the run."""

from __future__ import annotations

import dis
import marshal
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import BASE_ATTRIBUTES, MOVING
from buoy._compat.tensorflow import is_pipeline, is_reshuffling
from buoy.checkpoint.encoding import encode
from buoy.checkpoint.values import leaves
from buoy.errors import BuoyError, UsageError
from buoy.keras.data import rng
from buoy.keras.data.pipeline import nodes_of
from buoy.keras.state import state_dict
from buoy.keras.state.tensors import as_tensor

# Keys of dicts that stand for what is no plain value; older checkpoints have more of them.
_VARIABLES = "buoy.variables"
_TENSOR = "buoy.tensor"
_MARK = "buoy."
_CONTAINERS = (dict, list, set, deque)
_COPIED = (list, tuple, set, frozenset)
_PLAIN = (int, float, bool, str, bytes, type(None))
_NUMBERS = frozenset((int, float, bool, type(None)))
_ROWS = "bytes of rows"
"""Beside the attributes of a CSVLogger: how long its file was."""
_IN_THE_WAY = ("BackupAndRestore", "OrbaxCheckpoint")
_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_GIVE_BOTH = "hint: give the callback `state_dict()` and `load_state_dict(state)`"


def refuse_rivals(callbacks: Sequence[Any]) -> None:
    """Two that restore the same model would restore it twice."""
    for callback in callbacks:
        if _keras_kind(callback) in _IN_THE_WAY:
            raise UsageError(
                f"{_keras_kind(callback)} and buoy.keras.Guard would both restore the model",
                received="both in `callbacks`",
                expected="one of them",
                hint=f"leave {_keras_kind(callback)} out: the guard does more",
            )


class Memory:
    """What the callbacks of one `fit` remember.

    Keras's own are known by name. A user's own is asked (`state_dict` or `get_state`), or else its plain attributes and
    variables are kept as far as they have moved since the training began: what was passed to it stays as passed. What
    else it holds, and may move, is named in a warning.
    """

    def __init__(self, callbacks: Sequence[Any], say: Callable[[str], None]) -> None:
        self._callbacks, self._say = list(callbacks), say
        self._at_begin: dict[int, dict[str, Any]] = {}
        self._others: dict[int, dict[str, Any]] = {}
        """Of each callback what is not kept, to see whether it is replaced."""
        self._warned: set[tuple[int, str]] = set()

    def training_begins(self) -> None:
        """From now on attributes that change are memory."""
        for callback in self._callbacks:
            kept, others = _parted(callback)
            self._at_begin[id(callback)], self._others[id(callback)] = kept, others
            self._warn(callback, [name for name, value in others.items() if _moves(value)])

    def state(self) -> list[dict[str, Any]]:
        """What each callback remembers, in order, with its class's name."""
        return [{"kind": type(each).__name__, "state": self._state(each)} for each in self._callbacks]

    def load(self, stored: Sequence[dict[str, Any]], *, is_live: bool = False) -> list[str]:
        """Restore it, matched by class in order; returns what found no owner, in words.

        `is_live`: the training before was in this process, and the script has its variables and lists in its hands.
        """
        waiting, problems = list(stored), []
        for callback in self._callbacks:
            match = next((entry for entry in waiting if entry["kind"] == type(callback).__name__), None)
            if match is not None:
                waiting.remove(match)
                problems += self._load(callback, match["state"], is_live)
        gone = [f"{entry['kind']} is no longer among the callbacks" for entry in waiting if entry["state"]]
        return problems + gone

    def _state(self, callback: Any) -> Any:
        pair = _pair(callback)
        if pair is not None:
            return getattr(callback, pair[0])()
        known = {name: _value(each) for name, each in vars(callback).items() if name in _moving(callback)}
        before, (now, others) = self._at_begin.get(id(callback), {}), _parted(callback)
        moved = {
            name: value for name, value in now.items() if name not in before or not _same(before[name], value)
        }
        if (were := self._others.get(id(callback))) is not None:  # the training has begun
            self._warn(callback, [name for name, each in others.items() if each is not were.get(name)])
        rows = {_ROWS: _size(callback)} if _keras_kind(callback) == "CSVLogger" else {}
        return {**moved, **known, **rows}

    def _warn(self, callback: Any, names: list[str]) -> None:
        """Each once."""
        new = [name for name in names if (id(callback), name) not in self._warned]
        self._warned |= {(id(callback), name) for name in new}
        if new:
            self._say(
                f"{type(callback).__name__} has attributes that are not saved, and start over after a resume: "
                f"{', '.join(new)}; {_GIVE_BOTH}"
            )

    def _load(self, callback: Any, state: Any, is_live: bool) -> list[str]:
        """Returns what could not be restored, in words."""
        pair = _pair(callback)
        if pair is not None:
            getattr(callback, pair[1])(state)
            return []
        known, problems = _moving(callback), []
        for name in state:
            if name in known:
                setattr(callback, name, _value(state[name]))
            elif name != _ROWS and not _is_keras_own(callback):
                problems.append(_restore(callback, name, state[name], is_live))
                self._at_begin.get(id(callback), {}).pop(name, None)  # it moved once: it is memory for good
        return [words for words in problems if words is not None]


def append_logs(callbacks: Sequence[Any]) -> None:
    """A resumed training continues its CSV file instead of starting it over."""
    for callback in _csv_loggers(callbacks):
        callback.append = True


def drop_rows_to_come(callbacks: Sequence[Any], stored: Sequence[dict[str, Any]], epoch: int) -> None:
    """Of epochs that are trained again: what stands in a CSV file behind the checkpoint, if it is nothing else."""
    kept = [entry for entry in stored if isinstance(entry["state"], dict) and _ROWS in entry["state"]]
    known = [each for each in _csv_loggers(callbacks) if _pair(each) is None]
    if [type(each).__name__ for each in known] != [entry["kind"] for entry in kept]:
        return  # whose file is whose?
    for callback, size in zip(known, (entry["state"][_ROWS] for entry in kept), strict=True):
        # A file that is not there, or elsewhere; a row that is not Keras's; a logger that has no file.
        with suppress(OSError, ValueError, AttributeError, TypeError):
            with open(callback.filename, "rb") as file:
                before, behind = file.read(size), file.read()
            rows = behind.decode().splitlines()
            numbers = [int(row.split(callback.sep)[0]) for row in (rows if size else rows[1:])]
            # Those that this run wrote; another one's may stand there too.
            is_own = numbers == list(range(epoch, epoch + len(numbers)))
            if numbers and is_own and (not size or before.endswith(b"\n")):
                os.truncate(callback.filename, size)


def _csv_loggers(callbacks: Sequence[Any]) -> list[Any]:
    return [callback for callback in callbacks if _keras_kind(callback) == "CSVLogger"]


def _size(callback: Any) -> int:
    try:
        return os.path.getsize(callback.filename)
    except (OSError, ValueError, AttributeError, TypeError):  # a user's own may have no file
        return 0


def _pair(callback: Any) -> tuple[str, str] | None:
    return next(
        (pair for pair in _PAIRS if all(callable(getattr(callback, name, None)) for name in pair)), None
    )


def _moving(callback: Any) -> tuple[str, ...]:
    return MOVING.get(_keras_kind(callback) or "", ())


def _is_keras_own(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] == "keras"


def _keras_kind(callback: Any) -> str | None:
    """The name of the nearest class that is Keras's own."""
    for base in type(callback).__mro__:
        if base.__module__.partition(".")[0] == "keras" and base is not keras.callbacks.Callback:
            return base.__name__
    return None


@cache
def _written_by_keras(kind: type) -> frozenset[str]:
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


# -- what a user's own callback holds, attribute by attribute -----------------------------------------------------


def _parted(callback: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what of it is kept, copied; what is not), beside what Keras's class in it is known to move."""
    kept: dict[str, Any] = {}
    others: dict[str, Any] = {}
    if _is_keras_own(callback) or _pair(callback) is not None:
        return kept, others
    kind: Any = type(callback)
    theirs = {*BASE_ATTRIBUTES, *_moving(callback), *_written_by_keras(kind)}
    held: set[int] | None = None
    for name, value in vars(callback).items():
        if name in theirs:
            continue
        if _are_numbers(
            value
        ):  # a loss per batch, say: a million of them take seconds to be looked at one by one
            kept[name] = value.copy() if hasattr(value, "copy") else value
            continue
        is_variable = isinstance(value, tf.Variable | keras.Variable)
        if is_variable:
            held = _held_by_model(callback) if held is None else held
            if id(value) in held:
                continue
        try:
            copy = _copied_variable(value) if is_variable else _copied(value)
            encode(name, copy, as_tensor)
        except (BuoyError, RecursionError, tf.errors.OpError, _NotKept):
            others[name] = value
        else:
            kept[name] = copy
    return kept, others


class _NotKept(Exception):  # noqa: N818 - says what it is
    """A value that no checkpoint can have."""


def _are_numbers(value: Any) -> bool:
    return type(value) in (deque, *_COPIED) and _NUMBERS.issuperset(map(type, value))


def _copied(value: Any) -> Any:
    """What stands for it in a checkpoint, since the callback changes what it has."""
    if type(value) in _PLAIN:  # first: asking TensorFlow whether it is a tensor takes long, a million times
        return value
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque(map(_copied, value), value.maxlen)
    if type(value) in _COPIED:
        return type(value)(map(_copied, value))
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return {_TENSOR: _array(value)}
    if type(value).__module__ == "numpy" and getattr(value, "dtype", numpy.dtype("O")).kind in "biuf":
        return value.copy()
    raise _NotKept


def _copied_variable(variable: Any) -> Any:
    return {_VARIABLES: {name: _array(each) for name, each in state_dict.state_of([variable]).items()}}


def _array(value: Any) -> Any:
    """Of a variable or tensor; texts, bfloat16 and float8 have none that a checkpoint could hold."""
    array = numpy.asarray(value.numpy())
    if array.dtype.kind not in "biuf":
        raise _NotKept
    return array


def _moves(value: Any) -> bool:
    """Whether it holds something that is known to move as it is used: an RNG, variables, a shuffle."""
    try:
        return any(map(_has_state, leaves(value)))
    except RecursionError:
        return False


def _has_state(value: Any) -> bool:
    if isinstance(value, keras.Metric | keras.Optimizer | tf.Variable | keras.Variable):
        return True
    if isinstance(value, tf.data.Dataset) and is_pipeline(value):
        return any(map(is_reshuffling, nodes_of(value)))
    return rng.generator_state(value) is not None


def _held_by_model(callback: Any) -> set[int]:
    """Variables that are saved with the model anyway, by id."""
    model = callback.model
    if model is None:
        return set()
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = optimizer.variables if optimizer is not None else []
    return {id(variable) for variable in (*model.variables, *model.metrics_variables, *of_optimizer)}


def _same(one: Any, other: Any) -> bool:
    """Whether two copies are equal to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        if len(one) == len(other) and _are_numbers(one) and _are_numbers(other):
            return marshal.dumps(list(one), 2) == marshal.dumps(list(other), 2)
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, set | frozenset):
        return bool(one == other)
    if hasattr(one, "tobytes"):
        return bool(
            one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        )
    return repr(one) == repr(other)


def _restore(callback: Any, name: str, stored: Any, is_live: bool) -> str | None:
    """Restore an attribute, in place where that can be; what is in the way, in words.

    `is_live`: what the script may have changed since stays as it is.
    """
    now = getattr(callback, name, None)
    if is_live and isinstance(now, tf.Variable | keras.Variable):
        return None
    if isinstance(stored, dict) and set(stored) == {_VARIABLES}:
        if not isinstance(now, tf.Variable | keras.Variable):
            return (
                f"{type(callback).__name__} starts over in {name}, which is no single variable; {_GIVE_BOTH}"
            )
        here = state_dict.state_of([now])
        if problems := state_dict.check(here, stored[_VARIABLES], name):
            return f"{type(callback).__name__} starts over in {problems[0]}"
        state_dict.assign(here, stored[_VARIABLES])
        return None
    try:
        value = _revived(stored)
    except _NotKept:
        return f"{type(callback).__name__} starts over in {name}, which an older buoy has saved; {_GIVE_BOTH}"
    is_alike = type(stored) in _CONTAINERS and isinstance(now, type(stored))
    if is_alike and not is_live and getattr(now, "maxlen", None) == getattr(value, "maxlen", None):
        _fill(now, value)  # the script may hold the same list
    else:
        setattr(callback, name, value)
    return None


def _fill(container: Any, value: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(value)
    else:
        container.update(value)


def _revived(stored: Any) -> Any:
    """Copied, with tensors in place of what stands for them."""
    if isinstance(stored, dict):
        if set(stored) == {_TENSOR}:
            return tf.constant(stored[_TENSOR])
        if len(stored) == 1 and str(next(iter(stored))).startswith(_MARK):
            raise _NotKept  # stood for an RNG, or for variables in a container
        return {key: _revived(item) for key, item in stored.items()}
    if isinstance(stored, deque):
        return deque(map(_revived, stored), stored.maxlen)
    if type(stored) in _COPIED:
        return type(stored)(map(_revived, stored))
    return stored.copy() if isinstance(stored, numpy.ndarray) else stored


def _value(value: Any) -> Any:
    """Of what Keras's own callbacks hold: copied, tensors and numpy numbers as what they are worth."""
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value.copy() if type(value).__module__ == "numpy" else value
