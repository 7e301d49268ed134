"""Counts PyTorch's steps without a change in the script, and marks evaluation, saving and waiting for data."""

from __future__ import annotations

import functools
import time
from typing import Any

from buoy.flight.imports import after_import
from buoy.flight.last_words import leave_out_ours
from buoy.flight.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Hook this process's torch; called once, right after it was imported."""
    _count_optimizer_steps(recorder)
    after_import("torch.utils.data.dataloader", lambda: _time_data_loaders(recorder))
    _mark_evaluation(recorder)
    _mark_saving(recorder)


def _count_optimizer_steps(recorder: Recorder) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    beacon = recorder.beacon
    leader: int | None = None
    turn = 0
    others: set[int] = set()

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        # Several optimizers (a GAN, one per parameter) make one step together: only the leader's is counted.
        # Another one that steps twice while the leader rests has taken over.
        nonlocal leader, turn
        this = id(optimizer)
        if turn != recorder.turn:  # another run of a notebook begins: its first step counts
            leader, turn = None, recorder.turn
        if this == leader or leader is None or this in others:
            leader = this
            others.clear()
            beacon.step()
        else:
            others.add(this)

    register_optimizer_step_post_hook(stepped)


def _time_data_loaders(recorder: Recorder) -> None:
    from buoy._compat.torch import loader_iterators

    waited = recorder.beacon.waited
    iterator = loader_iterators()
    if iterator is None:
        return
    original = iterator.__next__

    @functools.wraps(original)
    def timed(self: Any) -> Any:
        start = time.monotonic()
        try:
            return original(self)
        except BaseException as error:
            leave_out_ours(error)
            raise
        finally:
            waited(time.monotonic() - start)

    iterator.__next__ = timed


def _mark_evaluation(recorder: Recorder) -> None:
    import torch

    beacon = recorder.beacon
    original = torch.nn.Module.eval

    @functools.wraps(original)
    def evaluate(self: Any) -> Any:
        beacon.phase("eval")  # until the next optimizer step
        try:
            return original(self)
        except BaseException as error:
            leave_out_ours(error)
            raise

    torch.nn.Module.eval = evaluate  # type: ignore[method-assign]


def _mark_saving(recorder: Recorder) -> None:
    import torch

    original = torch.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        try:
            with recorder.phase("checkpoint"):
                original(obj, f, *args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise
        recorder.event(
            "save", what="torch.save", path=str(f) if isinstance(f, str) or hasattr(f, "__fspath__") else None
        )

    torch.save = save
