"""A few steps under torch's own profiler: time by phase, bytes that each module keeps, and the raw trace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from buoy.flight.profile import Summary
from buoy.machine.files import make_folder
from buoy.torch.holders import holders
from buoy.torch.saved_bytes import SavedBytes
from buoy.torch.state import parts

_PHASES = ("data wait", "forward", "backward", "optimizer", "other")
_CALLS, _CALLS_PER_MODULE = 1024, 32
"""Calls of modules without a whole step, at least and per module of the model, from which on the record's size is
looked at inside of what runs: below them it may well be one step, whose activations are no record."""
_CALLS_BETWEEN_LOOKS = 256


class Profile:
    """torch.profiler around steps, and clocks of ours around their phases. A `buoy.flight.profile.Profiler`."""

    def __init__(
        self, folder: str | None, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self._folder = folder
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._undo: list[Callable[[], object]] = []
        self._spent = dict.fromkeys(_PHASES, 0.0)
        self._spent_in_whole_steps = dict(self._spent)
        self._calls = 0
        self._thread = 0
        self._saved = SavedBytes()
        self._is_in_backward = False
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        self._is_prepared = self._records = False

    def prepare(self) -> None:
        """What torch's own schedule does in its warm-up step."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # a second one would end the first
            raise RuntimeError("another torch profiler is at work")
        self._profiler.prepare_trace()
        self._is_prepared = True

    def begin(self, look: Callable[[], None], other_work: Callable[[], None]) -> None:
        """Hook what the phases are read from, and record. A validation is modules that run too: `look` sees it."""
        self._thread = threading.get_ident()
        self._hook_every_module(look)
        self._hook_modules()
        self._hook_optimizers()
        self._hook_backward()
        self._hook_loaders()
        self._record()

    def whole_step(self) -> None:
        """What was measured so far is of whole steps."""
        self._spent_in_whole_steps = dict(self._spent)
        self._calls = 0

    def cut(self) -> None:
        """Record no more. The hooks stay: they may be what is running now."""
        if self._records:
            self._is_prepared = self._records = False
            self._profiler.stop_trace()

    def stop(self) -> None:
        """Record no more, and take every hook away."""
        try:
            if self._is_prepared and not self._records:  # torch's own schedule ends a warm-up in the same way
                self._record()
            self.cut()
        finally:
            while self._undo:
                self._undo.pop()()

    def summary(self, steps: int, seconds: float) -> Summary:
        """What was measured; writes the trace."""
        known = self._spent_in_whole_steps
        spent: dict[str, float | None] = {**known, "other": max(0.0, seconds - sum(known.values()))}
        held = holders(self._modules, self._optimizers)
        trace = self._write_trace()
        return Summary(
            steps,
            seconds,
            spent,
            held=held.sizes,
            held_is_partial=held.is_partial,
            saved=self._saved.at_peak(),
            trace=trace,
            trace_is_lost=trace is None and self._folder is not None,
        )

    def _record(self) -> None:
        self._profiler.start_trace()
        self._records = True

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

    def _hook_every_module(self, look: Callable[[], None]) -> None:
        """Also those that are not of this training: it may be over, with nobody to say so."""
        enough = max(_CALLS, _CALLS_PER_MODULE * sum(1 for root in self._modules for _ in root.modules()))

        def called(*_: Any) -> None:
            if threading.get_ident() == self._thread:  # torch's profiler is ended where it was begun
                self._calls += 1
                if self._calls >= enough and self._calls % _CALLS_BETWEEN_LOOKS == 0:
                    look()

        hook = nn.modules.module.register_module_forward_pre_hook(called)
        self._undo.append(hook.remove)

    def _hook_modules(self) -> None:
        """Time in the outermost forward, and what each module's own operations keep for the backward pass."""
        entered: list[float] = []
        stack = self._saved.stack
        own: list[nn.Module | torch.optim.Optimizer] = [*self._modules, *self._optimizers]

        def before(name: str) -> Callable[..., None]:
            def enter(module: nn.Module, arguments: Any, options: Any) -> None:
                if not stack:
                    entered.append(time.perf_counter())
                    self._saved.forward_begins(_tensors_of(own), (arguments, options))
                stack.append(name)

            return enter

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            stack.pop()
            if not stack:
                began = entered.pop()
                if not self._is_in_backward:  # where a checkpointed part is computed again
                    self._spent["forward"] += time.perf_counter() - began

        for module in self._modules:
            root = f"{type(module).__name__}: " if len(self._modules) > 1 else ""
            for name, part in module.named_modules():
                kind = type(part).__name__
                # `2 (Linear)`: in a Sequential the name alone is only a number.
                shown = f"{root}{name} ({kind})" if name else f"{kind}'s own forward"
                self._undo.append(part.register_forward_pre_hook(before(shown), with_kwargs=True).remove)
                self._undo.append(part.register_forward_hook(after, always_call=True).remove)
        hooks = self._saved.hooks()
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
            if self._is_in_backward:  # one inside of the other, where a part is computed again
                return original(*arguments, **options)
            start, self._is_in_backward = time.perf_counter(), True
            try:
                original(*arguments, **options)
            finally:
                self._is_in_backward = False
                self._spent["backward"] += time.perf_counter() - start

        torch.autograd.backward = backward
        self._undo.append(lambda: setattr(torch.autograd, "backward", original))


def _tensors_of(things: Iterable[nn.Module | torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Parameters and buffers: what they hold is there before and after every step."""
    for thing in things:
        if isinstance(thing, nn.Module):
            yield from thing.parameters()
            yield from thing.buffers()
        else:
            yield from (parameter for group in thing.param_groups for parameter in group["params"])


def _is_whole(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64))
        return file.read().rstrip().endswith(b"}")


def profile_of(folder: str | None, objects: Iterable[object]) -> Profile:
    """A profile of the next steps of what a run tracks; the trace goes to its folder."""
    modules, optimizers, _ = parts(objects)
    return Profile(os.path.join(folder, "profiles") if folder is not None else None, modules, optimizers)
