"""What callbacks remember between epochs: best values, waits and counters, and the history of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import keras

from buoy.errors import UsageError
from buoy.keras import callback_values as values

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
    "CSVLogger": ("keys",),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "History": ("history", "epoch"),
}
_ROWS = "bytes of rows"
"""Beside the attributes of a CSVLogger: how long its file was."""
_IN_THE_WAY = ("BackupAndRestore", "OrbaxCheckpoint")
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
        self._at_begin = {
            id(callback): {name: values.frozen(value) for name, value in _attributes(callback).items()}
            for callback in self._callbacks
        }

    def state(self) -> list[dict[str, Any]]:
        """What each callback remembers, in order, with its class's name."""
        return [{"kind": type(each).__name__, "state": self._state(each)} for each in self._callbacks]

    def load(self, stored: Sequence[dict[str, Any]], *, is_live: bool = False) -> list[str]:
        """Give it back, matched by class in order; returns what found no owner, in words.

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
        known = {name: _plain(value) for name, value in vars(callback).items() if name in _moving(callback)}
        before, now = self._at_begin.get(id(callback), {}), _attributes(callback)
        moved = {
            name: value
            for name, value in now.items()
            if name not in before or not values.same(before[name], values.frozen(value))
        }
        rows = {_ROWS: _size(callback)} if _keras_kind(callback) == "CSVLogger" else {}
        return {**moved, **known, **rows}

    def _load(self, callback: Any, state: Any, is_live: bool) -> list[str]:
        """Returns what could not be given back, in words."""
        pair = _pair(callback)
        if pair is not None:
            getattr(callback, pair[1])(state)
            return []
        known, problems = _moving(callback), []
        for name in state:
            if name in known:
                setattr(callback, name, _plain(state[name]))
            elif name != _ROWS and not _is_keras_own(callback):
                problems.append(values.give_back(callback, name, state[name], is_live=is_live))
                self._at_begin.get(id(callback), {}).pop(name, None)  # it moved once: it is memory for good
        return [words for words in problems if words is not None]


def append_logs(callbacks: Sequence[Any]) -> None:
    """A resumed training continues its CSV file instead of beginning it anew."""
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
    except (OSError, ValueError, AttributeError, TypeError):  # a person's own may have no file
        return 0


def _pair(callback: Any) -> tuple[str, str] | None:
    return next(
        (pair for pair in _PAIRS if all(callable(getattr(callback, name, None)) for name in pair)), None
    )


def _moving(callback: Any) -> tuple[str, ...]:
    return _MOVING.get(_keras_kind(callback) or "", ())


def _attributes(callback: Any) -> dict[str, Any]:
    """What a person's own callback holds beside what Keras's class in it is known to move."""
    if _is_keras_own(callback):
        return {}
    return {
        name: value for name, value in values.attributes(callback).items() if name not in _moving(callback)
    }


def _is_keras_own(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] == "keras"


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
