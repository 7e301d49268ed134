"""A few steps under torch's own profiler: the time of each phase as its record has it, and the raw trace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from buoy._compat.torch import is_profiled
from buoy.flight.profile import Summary
from buoy.machine.files import make_folder
from buoy.torch.memory.holders import holders
from buoy.torch.state.state_dict import parts

_STEP_DONE = "buoy: a step is done"
_DATA_WAIT, _OPTIMIZER, _BACKWARD = (
    "enumerate(DataLoader)",
    "Optimizer.step#",
    "autograd::engine::evaluate_function",
)
"""How torch names what it records."""
_CALLS_BETWEEN_LOOKS = 256  # of modules


class Profile:
    """A `buoy.flight.profile.Profiler`."""

    def __init__(
        self, folder: str | None, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self._folder = folder
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._hook: Any = None
        self._calls = 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        self._is_prepared = self._records = False

    def prepare(self) -> None:
        """What torch's own schedule does in its warm-up step."""
        if is_profiled():  # a second one would end the first
            raise RuntimeError("another torch profiler is at work")
        self._profiler.prepare_trace()
        self._is_prepared = True

    def begin(self, look: Callable[[], None]) -> None:
        """Record; a validation is modules that run too, which `look` is told of."""
        thread = threading.get_ident()

        def called(*_: Any) -> None:
            self._calls += 1
            if self._calls % _CALLS_BETWEEN_LOOKS == 0 and threading.get_ident() == thread:
                look()  # torch's profiler is ended where it was begun

        self._hook = nn.modules.module.register_module_forward_pre_hook(called)
        self._profiler.start_trace()
        self._records = True

    def whole_step(self) -> None:
        """A mark in the record."""
        with torch.profiler.record_function(_STEP_DONE):
            pass

    def stop(self) -> None:
        """Record no more."""
        if self._is_prepared and not self._records:  # torch's own schedule ends a warm-up in the same way
            self._profiler.start_trace()
            self._records = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._records:
            self._is_prepared = self._records = False
            self._profiler.stop_trace()

    def summary(self, steps: int, seconds: float) -> Summary:
        """What torch recorded of whole steps; writes the trace."""
        held, trace = holders(self._modules, self._optimizers), self._write_trace()
        return Summary(
            steps,
            seconds,
            self._phases(seconds),
            held=held.sizes,
            held_is_partial=held.is_partial,
            trace=trace,
            trace_is_lost=trace is None and self._folder is not None,
        )

    def _phases(self, seconds: float) -> dict[str, float | None]:
        events: list[Any] = list(self._profiler.events() or ())  # type: ignore[no-untyped-call]
        end = max((event.time_range.start for event in events if event.name == _STEP_DONE), default=0.0)
        spent = dict.fromkeys((_DATA_WAIT, _OPTIMIZER, _BACKWARD), 0.0)
        for event in events:
            for name in spent:
                # A part that is computed again is a backward pass inside of another.
                if (
                    event.name.startswith(name)
                    and event.time_range.end <= end
                    and not _is_inside(event, name)
                ):
                    spent[name] += event.time_range.elapsed_us() / 1e6
        data_wait, optimizer, backward = spent.values()
        rest = max(0.0, seconds - sum(spent.values()))
        return {
            "data wait": data_wait,
            "backward": backward,
            "optimizer": optimizer,
            "forward, the rest": rest,
        }

    def _write_trace(self) -> str | None:
        if self._folder is None:
            return None
        path = os.path.join(self._folder, f"{int(time.time())}.pt.trace.json")
        try:
            make_folder(self._folder)
            self._profiler.export_chrome_trace(path)
            if _is_whole(path):
                return path
        except (OSError, RuntimeError):  # also where torch only logs that the disk was full
            pass
        for left in (path, f"{path}.tmp"):
            with suppress(OSError):
                os.unlink(left)
        return None


def _is_inside(event: Any, name: str) -> bool:
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(name):
        parent = parent.cpu_parent
    return parent is not None


def _is_whole(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64))
        return file.read().rstrip().endswith(b"}")


def profile_of(folder: str | None, objects: Iterable[object]) -> Profile:
    """A profile of the next steps of what a run tracks; the trace goes to its folder."""
    modules, optimizers, _ = parts(objects)
    return Profile(os.path.join(folder, "profiles") if folder is not None else None, modules, optimizers)
