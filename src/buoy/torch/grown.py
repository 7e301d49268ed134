"""Buffers of a module that training gives another shape, or makes at all: observers, memory banks, `None` at first.

A script that is started again builds them as they were at its first start. They are given the shape of the checkpoint,
but only where the checkpoint knows that they had been built as they are here: any other difference is another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_COMPILED = "_orig_mod."
Shape = list[int] | None
"""None: the buffer is registered, and there is none."""


class Grown:
    """What is in a module's state_dict, against what was there when it was tracked."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._built = {name: _shape(owner._buffers[key]) for name, owner, key in self._buffers()}
        self._parameters = {name: _shape(value) for name, value in module.named_parameters()}
        self.known: Mapping[str, Shape] = {}
        """Of the checkpoint that is to be loaded: as what each of them was built."""

    def changed(self) -> dict[str, Shape]:
        """The buffers that have another shape by now, and as what they were built."""
        now = ((name, _shape(owner._buffers[key])) for name, owner, key in self._buffers())
        return {name: self._built[name] for name, shape in now if shape != self._built.get(name, shape)}

    def new_parameters(self) -> list[str]:
        """Those that came or changed their shape after the module was tracked: no script begins with them."""
        now = self._module.named_parameters()
        return [name for name, value in now if self._parameters.get(name, ()) != _shape(value)]

    def may_differ(self, name: str) -> bool:
        """It was built as it is here, and grew in training."""
        return name in self.known and self._built.get(name, ()) == self.known[name]

    def make_room(self, state: Mapping[str, Any]) -> None:
        """Give those that may differ the shapes of this state, so that it can be loaded."""
        device = next((parameter.device for parameter in self._module.parameters()), None)
        for name, owner, key in self._buffers():
            value, here = state.get(name), owner._buffers[key]
            if self.may_differ(name) and isinstance(value, torch.Tensor) and _shape(here) != _shape(value):
                owner._buffers[key] = torch.empty_like(value, device=device if here is None else here.device)
            elif here is not None and is_expanded(here):
                owner._buffers[key] = here.clone(memory_format=torch.contiguous_format)

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        for path, owner in self._module.named_modules():
            for key in owner._buffers.keys() - owner._non_persistent_buffers_set:
                yield f"{path}.{key}".lstrip(".").replace(_COMPILED, ""), owner, key


def grown_in(things: Mapping[str, Any]) -> dict[str, dict[str, Shape]]:
    """Of the modules among tracked things, by name; for the checkpoint."""
    changed = {name: thing.grown.changed() for name, thing in things.items() if hasattr(thing, "grown")}
    return {name: buffers for name, buffers in changed.items() if buffers}


def expect_grown(things: Mapping[str, Any], stored: Mapping[str, Mapping[str, Shape]]) -> None:
    """Before a checkpoint is loaded: which buffers had grown in it."""
    for name, thing in things.items():
        if hasattr(thing, "grown"):
            thing.grown.known = stored.get(name, {})


def tell_of_new_parameters(things: Mapping[str, Any], told: set[str], say: Callable[[str], None]) -> None:
    """Once for each module: its checkpoints will be refused by the script that made them."""
    for name, thing in things.items():
        new = thing.grown.new_parameters() if hasattr(thing, "grown") and name not in told else []
        if new:
            told.add(name)
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            say(
                f"{name} has got parameters since `run.track`: {', '.join(new[:3])}{more}. Started again, the script "
                "must make them before `run.track`, or this checkpoint does not fit; hint: make them all at the start, "
                "and use them later"
            )


def is_expanded(buffer: torch.Tensor) -> bool:
    """It shows the same memory several times (`row.expand(3, 4)`), so nothing can be loaded into it."""
    return any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True))


def _shape(value: torch.Tensor | None) -> Shape:
    return None if value is None else list(value.shape)
