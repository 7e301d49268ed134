"""A few steps under torch's own profiler: time by phase, bytes that each module keeps, and the raw trace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from buoy.torch.holders import holders
from buoy.torch.state import parts
from buoy.units import format_bytes, format_duration

_PHASES = ("data wait", "forward", "backward", "optimizer", "other")


@dataclass
class Summary:
    """What the steps were spent on. Prints itself."""

    steps: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase, all steps together."""
    saved: dict[str, int] = field(default_factory=dict)
    """Bytes that each module keeps for the backward pass, at its highest, largest first."""
    held: dict[str, int] = field(default_factory=dict)
    """What holds memory now, largest first."""
    trace: str | None = None
    """For Perfetto, chrome://tracing and TensorBoard."""

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {format_duration(self.seconds / max(1, self.steps))} each"]
        for phase in _PHASES:
            spent = self.phases.get(phase, 0.0)
            share = 100 * spent / self.seconds if self.seconds else 0.0
            lines.append(f"  {phase:10} {share:5.1f} %  {format_duration(spent / max(1, self.steps))}")
        if self.saved:
            lines.append("kept for the backward pass, by module:")
            lines += [f"  {format_bytes(size):>10}  {name}" for name, size in list(self.saved.items())[:8]]
        if self.held:
            lines.append("what holds memory now:")
            lines += [f"  {format_bytes(size):>10}  {owner}" for owner, size in list(self.held.items())[:6]]
        if self.trace is not None:
            lines.append(f"trace for Perfetto or TensorBoard: {self.trace}")
        return "\n".join(lines)


class Profile:
    """Runs from one safe point to another; `between_steps` is called at each."""

    def __init__(
        self,
        steps: int,
        folder: str | None,
        modules: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self._wanted, self._folder = steps, folder
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._done = -1
        self._undo: list[Callable[[], object]] = []
        self.summary: Summary | None = None

    def between_steps(self) -> bool:
        """Begin, count, or end; False once it is over."""
        self._done += 1
        if self._done == 0:
            self._begin()
        elif self._done >= self._wanted:
            self._end()
            return False
        return True

    def _begin(self) -> None:
        self._spent = dict.fromkeys(_PHASES, 0.0)
        self._kept: dict[str, int] = {}
        self._stack: list[str] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        self._hook_modules()
        self._hook_optimizers()
        self._hook_backward()
        self._hook_loaders()
        self._start = time.perf_counter()
        self._profiler.start()

    def _end(self) -> None:
        self._profiler.stop()
        seconds = time.perf_counter() - self._start
        for undo in reversed(self._undo):
            undo()
        self._spent["other"] = max(0.0, seconds - sum(self._spent.values()))
        saved = dict(sorted(self._kept.items(), key=lambda item: -item[1]))
        held = holders(self._modules, self._optimizers)
        self.summary = Summary(self._done, seconds, self._spent, saved, held, self._write_trace())

    def _write_trace(self) -> str | None:
        if self._folder is None:
            return None
        os.makedirs(self._folder, exist_ok=True)
        path = os.path.join(self._folder, f"{int(time.time())}.pt.trace.json")
        self._profiler.export_chrome_trace(path)
        return path

    def _hook_modules(self) -> None:
        """Time in the outermost forward, and what each module's own operations keep for the backward pass."""
        entered: list[float] = []
        live = dict.fromkeys((name for module in self._modules for name, _ in module.named_modules()), 0)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if self._stack and not isinstance(tensor, nn.Parameter):
                name = self._stack[-1]
                live[name] += tensor.numel() * tensor.element_size()
                self._kept[name or "(the model itself)"] = max(self._kept.get(name, 0), live[name])
            return tensor

        def before(name: str) -> Callable[..., None]:
            def enter(module: nn.Module, arguments: Any) -> None:
                if not self._stack:
                    entered.append(time.perf_counter())
                    live.update(dict.fromkeys(live, 0))
                self._stack.append(name)

            return enter

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            self._stack.pop()
            if not self._stack:
                self._spent["forward"] += time.perf_counter() - entered.pop()

        for module in self._modules:
            for name, part in module.named_modules():
                self._undo.append(part.register_forward_pre_hook(before(name)).remove)
                self._undo.append(part.register_forward_hook(after, always_call=True).remove)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        hooks.__enter__()
        self._undo.append(lambda: hooks.__exit__(None, None, None))

    def _hook_optimizers(self) -> None:
        entered: list[float] = []

        def before(*_: Any) -> None:
            entered.append(time.perf_counter())

        def after(*_: Any) -> None:
            self._spent["optimizer"] += time.perf_counter() - entered.pop()

        for optimizer in self._optimizers:
            self._undo.append(optimizer.register_step_pre_hook(before).remove)
            self._undo.append(optimizer.register_step_post_hook(after).remove)

    def _hook_loaders(self) -> None:
        from torch.utils.data import dataloader

        iterator, original = dataloader._BaseDataLoaderIter, dataloader._BaseDataLoaderIter.__next__

        def timed(loader: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(loader)
            finally:
                self._spent["data wait"] += time.perf_counter() - start

        iterator.__next__ = timed  # type: ignore[method-assign,assignment]
        self._undo.append(lambda: setattr(iterator, "__next__", original))

    def _hook_backward(self) -> None:
        original = torch.autograd.backward

        def backward(*arguments: Any, **options: Any) -> None:
            start = time.perf_counter()
            try:
                original(*arguments, **options)
            finally:
                self._spent["backward"] += time.perf_counter() - start

        torch.autograd.backward = backward
        self._undo.append(lambda: setattr(torch.autograd, "backward", original))


def profile_of(steps: int, folder: str | None, objects: Iterable[object]) -> Profile:
    """A profile of the next steps of what a run tracks; the trace goes to its folder."""
    modules, optimizers, _ = parts(objects)
    return Profile(
        steps, os.path.join(folder, "profiles") if folder is not None else None, modules, optimizers
    )
