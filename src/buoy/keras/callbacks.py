"""What callbacks remember between epochs: best values, waits and counters, and the history of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from buoy.errors import UsageError
from buoy.keras import rng

# What moves while Keras's own callbacks work; what a person passed to them stays as passed this time.
_MOVING = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "epochs_since_last_save",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "History": ("history", "epoch"),
}
_IN_THE_WAY = ("BackupAndRestore", "OrbaxCheckpoint")
_KERAS_ATTRIBUTES = ("model", "_model", "params", "validation_data")
_GENERATOR = "buoy.generator"  # the key under which an attribute's random state is kept
_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


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

    Keras's own are known by name. A person's own is asked (`state_dict` or `get_state`), or else its plain
    attributes and generators are kept as far as they have moved since the training began: what was passed to it
    stays as passed.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        self._at_begin: dict[int, dict[str, Any]] = {}

    def training_begins(self) -> None:
        """From now on attributes that change are memory."""
        self._at_begin = {id(callback): _attributes(callback) for callback in self._callbacks}

    def state(self) -> list[dict[str, Any]]:
        """What each callback remembers, in order, with its class's name."""
        return [{"kind": type(each).__name__, "state": self._state(each)} for each in self._callbacks]

    def load(self, stored: Sequence[dict[str, Any]]) -> list[str]:
        """Give it back, matched by class in order; returns what found no owner, in words."""
        waiting = list(stored)
        for callback in self._callbacks:
            match = next((entry for entry in waiting if entry["kind"] == type(callback).__name__), None)
            if match is not None:
                waiting.remove(match)
                self._load(callback, match["state"])
        return [f"{entry['kind']} is no longer among the callbacks" for entry in waiting if entry["state"]]

    def _state(self, callback: Any) -> Any:
        pair = _pair(callback)
        if pair is not None:
            return getattr(callback, pair[0])()
        if _keras_kind(callback) is not None:
            return {
                name: _plain(value) for name, value in vars(callback).items() if name in _moving(callback)
            }
        before = self._at_begin.get(id(callback), {})
        now = _attributes(callback)
        return {
            name: value for name, value in now.items() if name not in before or not _same(before[name], value)
        }

    def _load(self, callback: Any, state: Any) -> None:
        pair = _pair(callback)
        if pair is not None:
            getattr(callback, pair[1])(state)
            return
        known = _moving(callback) if _keras_kind(callback) is not None else state
        for name in state:
            if name in known:
                _give_back(callback, name, state[name])
                self._at_begin.get(id(callback), {}).pop(name, None)  # it moved once: it is memory for good


def append_logs(callbacks: Sequence[Any]) -> None:
    """A resumed training continues its CSV file instead of beginning it anew."""
    for callback in callbacks:
        if _keras_kind(callback) == "CSVLogger":
            callback.append = True


def _pair(callback: Any) -> tuple[str, str] | None:
    return next(
        (pair for pair in _PAIRS if all(callable(getattr(callback, name, None)) for name in pair)), None
    )


def _moving(callback: Any) -> tuple[str, ...]:
    return _MOVING.get(_keras_kind(callback) or "", ())


def _attributes(callback: Any) -> dict[str, Any]:
    """The plain attributes of a person's own callback, copied, and where its generators are."""
    if _keras_kind(callback) is not None:
        return {}
    found: dict[str, Any] = {}
    for name, value in vars(callback).items():
        if name in _KERAS_ATTRIBUTES:
            continue
        if (state := rng.generator_state(value)) is not None:
            found[name] = {_GENERATOR: state}
        elif _is_plain(value):
            found[name] = _plain(value)
    return found


def _give_back(callback: Any, name: str, value: Any) -> None:
    if isinstance(value, dict) and set(value) == {_GENERATOR}:
        generator = getattr(callback, name, None)
        if rng.generator_state(generator) is not None:
            rng.set_generator_state(generator, value[_GENERATOR])
    else:
        setattr(callback, name, _plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) in (str, int) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    kind = type(value)
    return kind in (int, float, bool, str, type(None)) or (
        kind.__module__ == "numpy"
        and getattr(value, "dtype", None) is not None
        and value.dtype.kind in "biuf"
    )


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "tobytes"):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    return repr(one) == repr(other)


def _keras_kind(callback: Any) -> str | None:
    """The name of the nearest class that is Keras's own."""
    for base in type(callback).__mro__:
        if base.__module__.partition(".")[0] == "keras" and base is not keras.callbacks.Callback:
            return base.__name__
    return None


def _plain(value: Any) -> Any:
    """Copied, since the callback goes on changing it; tensors and numpy numbers as what they are worth."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value.copy() if type(value).__module__ == "numpy" else value
