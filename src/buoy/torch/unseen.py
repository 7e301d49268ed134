"""What a script holds beside the step that is planned: other modules, and optimizers that were not seen to step."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

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
                holder._parameters[f"idle{number}_{place}"] = parameter  # type: ignore[assignment]
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
        notes.append(f"modules beside the step's own are counted as held on the device: {said}")
    return notes
