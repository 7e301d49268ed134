"""A few steps under TensorFlow's own profiler: time by phase as far as it can be told, and the raw trace."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from buoy.keras.holders import holders
from buoy.units import format_bytes, format_duration

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
_PHASES = ("data wait", "step", "checkpoint")
_HELD = 6


@dataclass
class Summary:
    """What the steps were spent on. Prints itself."""

    steps: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase, all steps together."""
    operations: dict[str, float] = field(default_factory=dict)
    """Seconds that the operations of forward, backward and update took, added up over all threads."""
    held: dict[str, int] = field(default_factory=dict)
    """What holds memory now, largest first."""
    trace: str | None = None
    """The folder for TensorBoard's profile page."""

    def __str__(self) -> str:
        each = max(1, self.steps)
        lines = [f"{self.steps} steps, {format_duration(self.seconds / each)} each"]
        for phase in _PHASES:
            spent = self.phases.get(phase)
            if spent is None:
                lines.append(f"  {phase:10}     n/a")
                continue
            share = 100 * spent / self.seconds if self.seconds else 0.0
            lines.append(f"  {phase:10} {share:5.1f} %  {format_duration(spent / each)}")
        whole = sum(self.operations.values())
        if whole:
            shares = ", ".join(
                f"{name} {100 * spent / whole:.0f} %" for name, spent in self.operations.items()
            )
            lines.append(f"of the step's operations: {shares}")
        lines.append("forward, backward and update are one graph: the clock cannot tell them apart")
        if self.held:
            lines.append("what holds memory now:")
            lines += [
                f"  {format_bytes(size):>10}  {owner}" for owner, size in list(self.held.items())[:_HELD]
            ]
        if self.trace is not None:
            lines.append(f"trace for TensorBoard: tensorboard --logdir {self.trace}")
        return "\n".join(lines)


class Profile:
    """Runs from one place between two steps to another; `between_steps` is called at each."""

    def __init__(self, steps: int, folder: str, model: Any, keeper: Any) -> None:
        self._wanted, self._folder, self._model, self._keeper = steps, folder, model, keeper
        self._first: int | None = None
        self._done = 0
        self._saving = 0.0
        self.summary: Summary | None = None

    def between_steps(self, step: int) -> bool:
        """Begin, count, or end; False once it is over. `step`: of the run so far."""
        if self._first is None:
            self._first = step
            self._begin()
            return True
        self._done = step - self._first
        if self._done < self._wanted:
            return True
        self.end()
        return False

    def end(self) -> None:
        """Stop and look at what there is; also when the training is over before the steps were."""
        if self._first is None or self.summary is not None:
            return
        seconds = time.perf_counter() - self._start
        del self._keeper.save  # the class's own again
        tf.profiler.experimental.stop()
        data_wait, operations = _read(self._folder, getattr(self._model.optimizer, "name", None))
        phases = {"checkpoint": self._saving}
        if data_wait is not None:
            # What is left is the step: its callbacks and Keras's own loop are in it.
            phases |= {"data wait": data_wait, "step": max(0.0, seconds - data_wait - self._saving)}
        self.summary = Summary(self._done, seconds, phases, operations, holders([self._model]), self._folder)

    def _begin(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        tf.profiler.experimental.start(self._folder)
        save = self._keeper.save

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return save(*arguments, **options)
            finally:
                self._saving += time.perf_counter() - begin

        self._keeper.save = timed
        self._start = time.perf_counter()


class Profiling:
    """A guard's wish for a profile, and the profile while it lasts. What fails is said, and the training goes on."""

    for_next_fit = 0
    """Steps that `%buoy profile` wants of the next `fit`, whichever guard it has."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._wanted = 0
        self._profile: Profile | None = None

    def ask(self, steps: int) -> None:
        """Profile the next steps of this guard's training, under way or to come."""
        self._wanted = steps

    def between_steps(self, step: int, model: Any, keeper: Any) -> None:
        """Begin, go on or end; costs nothing where no profile is wanted."""
        if self._profile is None and not self._wanted and not Profiling.for_next_fit:
            return
        try:
            if self._profile is None:
                steps, self._wanted, Profiling.for_next_fit = self._wanted or Profiling.for_next_fit, 0, 0
                folder = os.path.join(keeper.folder, "profiles", str(int(time.time())))
                self._profile = Profile(steps, folder, model, keeper)
            if not self._profile.between_steps(step):
                self.close()
        except Exception as error:  # noqa: BLE001 - a second profiler, a full disk: no reason to end a training
            self._profile = None
            self._say(f"there is no profile: {error}")

    def close(self) -> None:
        """Tell what was measured, also where the training was over before the steps were."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        try:
            profile.end()
        except Exception as error:  # noqa: BLE001 - the same
            self._say(f"there is no profile: {error}")
            return
        self._say(str(profile.summary))


def _read(folder: str, optimizer: str | None) -> tuple[float | None, dict[str, float]]:
    """Seconds of waiting for data, and of operations by their part of the step; None and {} if they cannot be read."""
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # another version keeps it elsewhere: the raw trace is there all the same
        return None, {}
    waited, parts = 0.0, {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for path in glob.glob(os.path.join(glob.escape(folder), "**", "*.xplane.pb"), recursive=True):
        space = xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        for plane in space.planes:
            names = {key: value.name for key, value in plane.event_metadata.items()}
            for event in (event for line in plane.lines for event in line.events):
                name, spent = names.get(event.metadata_id, ""), event.duration_ps / 1e12
                if name.startswith(_DATA_WAIT):
                    waited += spent
                elif (part := _part(name, optimizer)) is not None:
                    parts[part] += spent
    return waited, parts if any(parts.values()) else {}


def _part(name: str, optimizer: str | None) -> str | None:
    """Of which part of the step an operation is, by the name that its graph gives it: `.../dense/MatMul:MatMul`."""
    path, separator, kind = name.partition(":")
    if not separator or "/" not in path or " " in path or kind in _WRAPPERS or "::" in name:
        return None
    if "gradient_tape/" in path:
        return "backward"
    if optimizer and f"/{optimizer}/" in f"/{path}":
        return "update"
    return "forward"
