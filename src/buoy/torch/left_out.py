"""What trains along with what is tracked and is not tracked itself: it would begin anew after a resume, unseen.

A parameter beside the model (a learnt temperature, the weights of a loss) that a tracked optimizer steps, and a
scheduler that sets a tracked optimizer's learning rate.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from buoy.torch.state import Tracked, unwrapped

_DEPTH = 3  # an object of the person's own, its scheduler, those that this one chains
_MOST_PARTS = 2000
_SHOWN = 3
_SAVED_AS_THEY_ARE = (torch.Tensor, dict, list, set, deque)


class LeftOut:
    """Tells of it once, by the optimizer's name."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._looked_at: tuple[int, int] | None = None
        self._told: set[str] = set()

    def look(self, objects: Mapping[str, object], things: Mapping[str, Tracked]) -> None:
        """Where something was tracked, or given to an optimizer, since the last look; else it costs nothing."""
        optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        now = (len(objects), sum(len(g["params"]) for each in optimizers.values() for g in each.param_groups))
        if now == self._looked_at:
            return
        self._looked_at = now
        with suppress(
            Exception
        ):  # it only tells: a state_dict() of somebody's own that fails is told by the save
            self._tell_of_parameters(optimizers, objects, things)
            self._tell_of_schedulers(optimizers, objects)

    def _tell_of_parameters(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        objects: Mapping[str, object],
        things: Mapping[str, Tracked],
    ) -> None:
        for name, optimizer in optimizers.items():
            lost = _parameters(optimizer, objects, things) if name not in self._told else []
            if lost:
                self._told.add(name)
                more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
                self._say(
                    f"{name} trains what is in nothing that is tracked, so it is not saved, and begins anew after a "
                    f"resume: {', '.join(lost[:_SHOWN])}{more}; hint: track it under a name of its own, or the module "
                    "that it is in"
                )

    def _tell_of_schedulers(
        self, optimizers: Mapping[str, torch.optim.Optimizer], objects: Mapping[str, object]
    ) -> None:
        names = {id(optimizer): name for name, optimizer in optimizers.items()}
        known: set[int] | None = None
        for scheduler in _living_schedulers() if names else ():
            kind, name = type(scheduler).__name__, names.get(id(getattr(scheduler, "optimizer", None)))
            if name is None or f"{kind} of {name}" in self._told:
                continue
            if known is None:
                known = {id(part) for each in objects.values() for part in _inside(each)}
            if id(scheduler) not in known:
                self._told.add(f"{kind} of {name}")
                self._say(
                    f"a {kind} sets the learning rate of {name} and is not tracked: it begins anew after a resume; "
                    "hint: `run.track(scheduler=scheduler)`"
                )


def _parameters(
    optimizer: torch.optim.Optimizer, objects: Mapping[str, object], things: Mapping[str, Tracked]
) -> list[str]:
    """Those that it trains and no checkpoint will have, in words."""
    modules = [unwrapped(each) for each in objects.values() if isinstance(each, nn.Module)]
    saved = {id(parameter) for module in modules for parameter in module.parameters()}
    left = [
        (f"parameter {number} of group {place}, {tuple(parameter.shape)}", parameter)
        for place, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
        if parameter.requires_grad and id(parameter) not in saved
    ]
    if not left:
        return []
    others = [
        # What has a state_dict() of its own may give copies of them.
        (tensor, not isinstance(objects.get(name), _SAVED_AS_THEY_ARE))
        for name, thing in things.items()
        if not isinstance(objects.get(name), (nn.Module, torch.optim.Optimizer))
        for tensor in _tensors(thing.state())
    ]
    return [
        words
        for words, parameter in left
        if not any(_are_same(parameter, other, may_be_a_copy) for other, may_be_a_copy in others)
    ]


def _are_same(parameter: torch.Tensor, saved: torch.Tensor, may_be_a_copy: bool) -> bool:
    if parameter.shape != saved.shape:
        return False
    mine = parameter.detach()
    if mine.data_ptr() == saved.data_ptr():
        return True
    if not may_be_a_copy or not mine.numel():
        return may_be_a_copy
    last = (-1,) * mine.dim()  # one number first: of layers that are alike all would be brought to the host
    saved = saved.detach()
    if mine[last].item() != saved[last].to(mine.dtype).item():
        return False
    return torch.equal(mine.cpu(), saved.to("cpu", mine.dtype))


def _tensors(state: object) -> Iterator[torch.Tensor]:
    for part in _inside(state, depth=100, most=1 << 20):
        if isinstance(part, torch.Tensor):
            yield part
        elif type(part).__name__ == "ndarray":
            yield torch.as_tensor(part)


def _living_schedulers() -> list[LRScheduler]:
    """An optimizer does not know its own. By type: asking for `__class__` wakes what is loaded lazily."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]


def _inside(thing: object, depth: int = _DEPTH, most: int = _MOST_PARTS) -> Iterator[Any]:
    """It, what lies in it if it is a container, and what its attributes hold."""
    ahead: list[tuple[object, int]] = [(thing, depth)]
    seen: set[int] = set()
    while ahead and len(seen) < most:
        here, left = ahead.pop()
        if id(here) in seen:
            continue
        if isinstance(here, (str, bytes, int, float, type(None))):
            continue  # nor counted: a history of losses is no place for a scheduler, and hides none
        seen.add(id(here))
        yield here
        if not left or isinstance(here, (torch.Tensor, nn.Module)):
            continue
        if isinstance(here, Mapping):
            inner = list(here.values())
        elif isinstance(here, (list, tuple, deque)):
            inner = list(here)
        else:
            inner = list(getattr(here, "__dict__", {}).values())
        # Schedulers chain others, which chain others again; only a person's own objects may lead anywhere.
        further = left if isinstance(here, (LRScheduler, list, tuple)) else left - 1
        ahead += [(each, further) for each in reversed(inner)]
