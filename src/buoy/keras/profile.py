"""A few steps under TensorFlow's own profiler: time by phase as far as it can be told, and the raw trace."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from buoy.flight.profile import Summary
from buoy.keras.holders import holders
from buoy.machine.files import make_folder

_DATA_WAIT = "IteratorGetNextOp::DoCompute"
"""What TensorFlow calls the wait for the next batch, whether the step's graph or Python asks for it."""
_WRAPPERS = (
    "PartitionedCall",
    "StatefulPartitionedCall",
    "While",
    "StatelessWhile",
    "If",
    "StatelessIf",
    "Case",
)


_OF_CALLBACKS = ("on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end")


class Profile:
    """TensorFlow's profiler around steps, and clocks of ours around the callbacks that come between them and the
    checkpoints. A `flight.profile.Profiler`.
    """

    def __init__(
        self,
        keeper: Any,
        models: Iterable[Any],
        optimizers: Iterable[Any],
        callbacks: Iterable[Any] | None = None,
    ) -> None:
        """`callbacks`: whose time is not the step's; None for a loop, which has none."""
        self._folder = os.path.join(keeper.folder, "profiles", str(int(time.time())))
        self._keeper, self._models, self._optimizers = keeper, list(models), list(optimizers)
        self._callbacks = list(callbacks or ())
        self._spent = {} if callbacks is None else {"callbacks": 0.0}
        self._spent["checkpoint"] = 0.0
        self._spent_in_whole_steps = dict(self._spent)
        self._inner = 0.0
        self._thread = 0
        self._records = self._has_whole_step = False
        self._hooks = contextlib.ExitStack()

    def prepare(self) -> None:
        """TensorFlow's profiler starts at once."""

    def begin(self, look: Callable[[], None], other_work: Callable[[], None]) -> None:
        """Record, and time what is no step. `fit` always comes to its end: nobody needs to look."""
        self._thread = threading.get_ident()
        for name in ("on_test_begin", "on_predict_begin"):  # every evaluation's: `fit`'s own and a callback's
            self._hooks.callback(_before(keras.callbacks.CallbackList, name, other_work))
        for callback in self._callbacks:
            for name in _OF_CALLBACKS:
                self._time(callback, name, "callbacks")
        self._time(self._keeper, "save", "checkpoint")
        make_folder(self._folder)
        tf.profiler.experimental.start(self._folder)
        self._records = True

    def whole_step(self) -> None:
        """What was measured so far is of whole steps."""
        self._spent_in_whole_steps = dict(self._spent)
        self._has_whole_step = True

    def cut(self) -> None:
        """TensorFlow's profiler has nothing that can be ended apart."""
        self.stop()

    def stop(self) -> None:
        """Record no more; TensorFlow writes its trace, which is of no use without a whole step."""
        self._hooks.close()
        if self._records:
            self._records = False
            tf.profiler.experimental.stop()
            if not self._has_whole_step:
                shutil.rmtree(self._folder, ignore_errors=True)

    def summary(self, steps: int, seconds: float) -> Summary:
        """What was measured, as far as the trace tells."""
        data_wait, operations = _read(
            self._folder, [getattr(each, "name", None) for each in self._optimizers]
        )
        beside = self._spent_in_whole_steps
        # What is left is the step, with Keras's own loop around it. A clock around the training function would not
        # do: on a GPU it returns before the step is done.
        step = None if data_wait is None else max(0.0, seconds - data_wait - sum(beside.values()))
        phases = {"data wait": data_wait, "step": step, **beside}
        held = holders(self._models, self._optimizers)
        trace = self._folder if any(os.path.getsize(path) for path in _traces(self._folder)) else None
        return Summary(
            steps,
            seconds,
            phases,
            held=held.sizes,
            held_is_partial=held.is_partial,
            operations=operations,
            trace=trace,
            trace_is_lost=trace is None,
        )

    def _time(self, thing: Any, name: str, phase: str) -> None:
        """Count what the method takes, without what is counted for another one inside of it."""
        # On the class: a callback that is saved as a whole is saved as it was. Some have a function of their own.
        owner = thing if name in vars(thing) else type(thing)
        original = getattr(owner, name)
        if getattr(original, "_is_timed_by_buoy", False):
            return  # two callbacks of one class

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:  # beside the training, which does not wait for it
                return original(*arguments, **options)
            outer, self._inner = self._inner, 0.0
            begin = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                took = time.perf_counter() - begin
                self._spent[phase] += took - self._inner
                self._inner = outer + took

        timed._is_timed_by_buoy = True  # type: ignore[attr-defined]
        self._hooks.callback(_put(owner, name, timed))


def _put(owner: Any, name: str, function: Any) -> Callable[[], None]:
    """Have this in place of the method of that name; what takes it back."""
    if name not in vars(owner):
        setattr(owner, name, function)
        return lambda: delattr(owner, name)
    original = vars(owner)[name]
    setattr(owner, name, function)
    return lambda: setattr(owner, name, original)


def _before(owner: Any, name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Have this called before the method of that name; what takes it back."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(self: Any, *arguments: Any, **options: Any) -> Any:
        call()
        return original(self, *arguments, **options)

    return _put(owner, name, hooked)


def _traces(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "**", "*.xplane.pb"), recursive=True)


def _read(folder: str, optimizers: list[str | None]) -> tuple[float | None, dict[str, float]]:
    """Seconds of waiting for data, and of operations by their part of the step; None and {} if they cannot be read."""
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # another version keeps it elsewhere: the raw trace is there all the same
        return None, {}
    waited, parts = 0.0, {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for path in _traces(folder):
        space = xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        for plane in space.planes:
            names = {key: value.name for key, value in plane.event_metadata.items()}
            for event in (event for line in plane.lines for event in line.events):
                name, spent = names.get(event.metadata_id, ""), event.duration_ps / 1e12
                if name.startswith(_DATA_WAIT):
                    waited += spent
                elif (part := _part(name, optimizers)) is not None:
                    parts[part] += spent
    return waited, parts if any(parts.values()) else {}


def _part(name: str, optimizers: list[str | None]) -> str | None:
    """Of which part of the step an operation is, by the name that its graph gives it: `.../dense/MatMul:MatMul`."""
    path, separator, kind = name.partition(":")
    if not separator or "/" not in path or " " in path or kind in _WRAPPERS or "::" in name:
        return None
    if "gradient_tape/" in path:
        return "backward"
    if any(optimizer and f"/{optimizer}/" in f"/{path}" for optimizer in optimizers):
        return "update"
    return "forward"
