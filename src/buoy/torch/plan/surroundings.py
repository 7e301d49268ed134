"""What a script holds beside the step that is planned: other modules, and optimizers that were not seen to step.

What a rehearsed script must not reach: a GPU, a compiler, more threads, and processes of its own that train.

The floating-point operations of a training step, counted on meta tensors; runs in a tracing child.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

from buoy._compat.torch import parameters_of
from buoy.estimate.child import EstimateError
from buoy.units import format_bytes


def modules_alive() -> list[nn.Module]:
    """The modules that exist while the script is at its step; a part of another one is not named itself."""
    gc.collect()
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def not_stepped(
    built: list[weakref.ref[torch.optim.Optimizer]], stepped: list[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The optimizers that exist and train something which none that stepped does: one around another is the other."""
    trained = {id(parameter) for optimizer in stepped for parameter in _parameters(optimizer)}
    alive = [optimizer for made in built if (optimizer := made()) is not None]
    return [
        optimizer
        for optimizer in alive
        if any(p.requires_grad and id(p) not in trained for p in _parameters(optimizer))
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hold_what_is_beside(
    holder: nn.Module, idle: list[torch.optim.Optimizer], beside: list[nn.Module]
) -> list[str]:
    """Let the holder have the weights that exist beside the step's; returns what to say about them."""
    notes = []
    inside = {id(value) for value in (*holder.parameters(), *holder.buffers())}
    for number, optimizer in enumerate(idle):
        notes.append(
            f"an optimizer ({type(optimizer).__name__}) was not seen to step in the script's first batches: "
            "its state and gradients are counted as if it had"
        )
        for place, parameter in enumerate(_parameters(optimizer)):
            if id(parameter) not in inside:
                parameters_of(holder)[f"idle{number}_{place}"] = parameter  # type: ignore[assignment]
                inside.add(id(parameter))
    names: dict[str, int] = {}
    for module in beside:
        for value in (*module.parameters(), *module.buffers()):
            if id(value) not in inside:
                inside.add(id(value))
                holder.register_buffer(f"beside{len(inside)}", value.detach(), persistent=False)
                size = value.numel() * value.element_size()
                names[type(module).__name__] = names.get(type(module).__name__, 0) + size
    if names:
        said = ", ".join(f"{name} {format_bytes(size)}" for name, size in names.items())
        notes.append(f"modules other than the step's own are counted as held on the device: {said}")
    return notes


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
