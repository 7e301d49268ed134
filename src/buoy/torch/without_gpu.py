"""What a rehearsed script must not reach: a GPU, a compiler, more threads, and processes of its own that train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

from buoy.estimate.request import EstimateError

HOST = torch.device("cpu")
# Processes that make data: the DataLoader's workers, pools and managers.
_DATA = ("torch.utils.data.", "multiprocessing.")


def on_host(args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Where the script asks for a GPU it gets the host: no GPU is touched, and the tracer puts everything on one."""

    def host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value

    if "device" in named:
        named["device"] = HOST if type(named["device"]) is int else host(named["device"])
    return tuple(host(value) for value in args), named


@contextlib.contextmanager
def without_gpu(compiled: list[bool]) -> Iterator[None]:
    """What scripts ask of CUDA beside its tensors; and nothing is compiled, as it is estimated eager."""

    def eager(model: Any = None, **_: Any) -> Any:
        compiled.append(True)
        return model if model is not None else lambda function: function

    quiet: dict[tuple[Any, str], Any] = {
        (torch.cuda, name): lambda *args, **kwargs: None
        for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
    }
    quiet[torch, "compile"] = eager
    # Traces are forked off later: the threads of a pool would be missing there.
    quiet[torch, "set_num_threads"] = lambda number: None
    move = nn.Module.to

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        numbered = bool(args) and type(args[0]) is int
        return move(module, *(HOST, *args[1:]) if numbered else args, **kwargs)

    quiet[nn.Module, "to"] = moved
    quiet[BaseProcess, "start"] = _started(BaseProcess.start)
    before = {place: getattr(*place) for place in quiet}
    for (owner, name), ours in quiet.items():
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for (owner, name), theirs in before.items():
            setattr(owner, name, theirs)


def _started(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Starts workers that make data; a script that trains elsewhere would train for real there."""

    def started(process: Any) -> None:
        target = process._target
        if target is not None and not str(target.__module__).startswith(_DATA):
            raise EstimateError(
                "the script trains in processes of its own",
                received=f"it starts one for {target.__name__}()",
                expected="a training loop in the script's own process",
                hint="give a function that returns model and batch: `buoy plan train.py:build`",
            )
        start(process)

    return started
