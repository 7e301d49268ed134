"""A few steps under TensorFlow's own profiler: the wait for data as its record has it, and the raw trace."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from buoy.flight.profile import Summary
from buoy.keras.memory.holders import holders
from buoy.machine.files import make_folder

_DATA_WAIT = "IteratorGetNextOp::DoCompute"
"""What TensorFlow calls the wait for the next batch, whether the step's graph or Python asks for it."""


class Profile:
    """A `buoy.flight.profile.Profiler`."""

    def __init__(self, folder: str, models: Iterable[Any], optimizers: Iterable[Any]) -> None:
        self._folder = os.path.join(folder, "profiles", str(int(time.time())))
        self._models, self._optimizers = list(models), list(optimizers)
        self._records = self._has_whole_step = False

    def prepare(self) -> None:
        """TensorFlow's profiler starts at once."""

    def begin(self, look: Callable[[], None]) -> None:
        """Record."""
        make_folder(self._folder)
        tf.profiler.experimental.start(self._folder)
        self._records = True

    def whole_step(self) -> None:
        """There is something to keep."""
        self._has_whole_step = True

    def stop(self) -> None:
        """Record no more; TensorFlow writes its trace, which is of no use without a whole step."""
        if self._records:
            self._records = False
            tf.profiler.experimental.stop()
            if not self._has_whole_step:
                shutil.rmtree(self._folder, ignore_errors=True)

    def summary(self, steps: int, seconds: float) -> Summary:
        """What was measured, as far as the trace tells."""
        data_wait = _data_wait(self._folder)
        held = holders(self._models, self._optimizers)
        trace = self._folder if any(os.path.getsize(path) for path in _traces(self._folder)) else None
        return Summary(
            steps,
            seconds,
            {"data wait": data_wait, "step": None if data_wait is None else max(0.0, seconds - data_wait)},
            held=held.sizes,
            held_is_partial=held.is_partial,
            trace=trace,
            trace_is_lost=trace is None,
        )


def _traces(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "**", "*.xplane.pb"), recursive=True)


def _data_wait(folder: str) -> float | None:
    """Seconds of waiting for data; None if they cannot be read."""
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # another version keeps it elsewhere: the raw trace is there all the same
        return None
    waited = 0.0
    for path in _traces(folder):
        space = xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        for plane in space.planes:
            names = {key: value.name for key, value in plane.event_metadata.items()}
            for event in (event for line in plane.lines for event in line.events):
                if names.get(event.metadata_id, "").startswith(_DATA_WAIT):
                    waited += event.duration_ps / 1e12
    return waited
