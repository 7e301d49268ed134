"""What `state_dict` forgets. Buffers and `requires_grad` are saved and restored; the rest is warned about, once.

Warned about: parameters that are trained and not tracked, schedulers that are not tracked, parameters and parameter
groups that training adds, and the counts of torchmetrics' metrics inside a model.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from buoy._compat.torch import COMPILED, buffers_of, unsaved_buffers, version_of
from buoy._compat.torchmetrics import forgets_its_counts
from buoy.torch.state.tensors import WORDS

_DEPTH = 3  # an object of the user's own, its scheduler, those that this one chains
_MOST_PARTS = 2000
_SHOWN = 3
_SMALL = 1 << 16  # bytes of a buffer that may be copied, to be compared at each checkpoint


class Beside:
    """What training has changed in a module, and its `state_dict` does not have or does not say."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shapes = {name: _shape(owner, key) for name, owner, key in self._buffers(persistent=True)}
        self._marks = {
            name: _Mark(buffers_of(owner)[key]) for name, owner, key in self._buffers(persistent=False)
        }
        self._parameters = {name: tuple(each.shape) for name, each in self._named_parameters().items()}
        self._trained = {name: each.requires_grad for name, each in self._named_parameters().items()}
        self.reshaped: Collection[str] = ()
        """The buffers that have a shape of their own in the checkpoint that is to be loaded."""

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """Those with `persistent=False` that were written or replaced; constants, which most are, are left alone."""
        found = {}
        for name, owner, key in self._buffers(persistent=False):
            buffer = buffers_of(owner)[key]
            if buffer is None or not _can_be_saved(buffer):
                continue
            if name not in self._marks or self._marks[name].is_left_by(buffer):
                found[name] = buffer.detach().cpu()
        return found

    def reshaped_buffers(self) -> list[str]:
        """Those of the `state_dict` that training gave another shape, or made: observers, memory banks."""
        now = [(name, _shape(owner, key)) for name, owner, key in self._buffers(persistent=True)]
        return [name for name, shape in now if shape != self._shapes.get(name, shape)]

    def changed_training(self) -> dict[str, bool]:
        """The parameters that are trained and were frozen when the module was tracked, or the other way."""
        now = {name: each.requires_grad for name, each in self._named_parameters().items()}
        return {name: flag for name, flag in now.items() if self._trained.get(name, flag) != flag}

    def new_parameters(self) -> list[str]:
        """Those that came, or changed their shape, after the module was tracked: no script begins with them."""
        now = self._named_parameters()
        return [name for name, each in now.items() if self._parameters.get(name, ()) != tuple(each.shape)]

    def make_room(self, state: Mapping[str, Any]) -> None:
        """Give the buffers of `reshaped` the shapes of this state, so that it can be loaded."""
        device = next((parameter.device for parameter in self._module.parameters()), None)
        for name, owner, key in self._buffers(persistent=True):
            value, here = state.get(name), buffers_of(owner)[key]
            differs = isinstance(value, torch.Tensor) and _shape(owner, key) != tuple(value.shape)
            if name in self.reshaped and differs:
                buffers_of(owner)[key] = torch.empty_like(
                    state[name], device=device if here is None else here.device
                )
            elif here is not None and _is_expanded(here):
                buffers_of(owner)[key] = here.clone(memory_format=torch.contiguous_format)

    def load(self, buffers: Mapping[str, torch.Tensor], training: Mapping[str, bool]) -> list[str]:
        """Restore these; the names of buffers that have no place here any more."""
        places = {name: (owner, key) for name, owner, key in self._buffers(persistent=False)}
        device = next((parameter.device for parameter in self._module.parameters()), None)
        for name, value in buffers.items():
            if name not in places:
                continue
            owner, key = places[name]
            here = buffers_of(owner)[key]
            fits = here is not None and here.shape == value.shape and here.dtype == value.dtype
            if here is not None and fits and not _is_expanded(here):
                with torch.no_grad():
                    here.copy_(value)
            else:  # a cache that had grown, or what cannot be written
                buffers_of(owner)[key] = value.to(device if here is None else here.device, copy=True)
        for name, parameter in self._named_parameters().items():
            wanted = training.get(name, self._trained.get(name, parameter.requires_grad))
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        return [name for name in buffers if name not in places]

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {name.replace(COMPILED, ""): each for name, each in self._module.named_parameters()}

    def _buffers(self, *, persistent: bool) -> Iterator[tuple[str, nn.Module, str]]:
        for path, owner in self._module.named_modules():
            unsaved = unsaved_buffers(owner)
            for key in buffers_of(owner):
                if (key in unsaved) != persistent:
                    yield f"{path}.{key}".lstrip(".").replace(COMPILED, ""), owner, key


def state_beside(things: Mapping[str, Any]) -> dict[str, Any]:
    """For the checkpoint: what training changed in the modules among tracked things, by name."""
    modules = {name: thing.beside for name, thing in things.items() if hasattr(thing, "beside")}
    return {
        "buffers": {name: found for name, each in modules.items() if (found := each.changed_buffers())},
        "grown": {name: found for name, each in modules.items() if (found := each.reshaped_buffers())},
        "changes": {"frozen": {name: each.changed_training() for name, each in modules.items()}},
    }


def expect(things: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Before a checkpoint is loaded: which buffers have a shape of their own in it."""
    for name, thing in things.items():
        if hasattr(thing, "beside"):
            thing.beside.reshaped = state.get("grown", {}).get(name, ())


def load_beside(things: Mapping[str, Any], state: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """After it was loaded: the rest."""
    for name, thing in things.items():
        if hasattr(thing, "beside"):
            buffers = state.get("buffers", {}).get(name, {})
            training = state.get("changes", {}).get("frozen", {}).get(name, {})
            gone = thing.beside.load(buffers, training)
            if gone:
                say(f"saved, but not in {name} any more: the buffers {', '.join(gone)}")


def _is_expanded(buffer: torch.Tensor) -> bool:
    """It shows the same memory several times (`row.expand(3, 4)`), so nothing can be loaded into it."""
    return any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True))


def _shape(owner: nn.Module, key: str) -> tuple[int, ...] | None:
    buffer = buffers_of(owner)[key]
    return None if buffer is None else tuple(buffer.shape)


def _can_be_saved(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.dtype in WORDS and buffer.device.type != "meta"


class _Mark:
    """How a buffer was found."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        self._buffer = weakref.ref(buffer) if buffer is not None else None
        self._version = version_of(buffer) if buffer is not None else -1
        small = buffer is not None and buffer.nbytes <= _SMALL and _can_be_saved(buffer)
        self._copy = buffer.detach().clone() if buffer is not None and small else None

    def is_left_by(self, buffer: torch.Tensor) -> bool:
        """It was replaced or written since."""
        if self._buffer is None or self._buffer() is not buffer or self._version != version_of(buffer):
            return True
        # torch counts what is written, but not what is written through `.data`.
        return self._copy is not None and not torch.equal(self._copy, buffer)


class Forgotten:
    """Warns, once each, about what no checkpoint will have."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._looked_at: object = None
        self._warned: set[str] = set()

    def look_at_growth(self, things: Mapping[str, Any]) -> None:
        """Before a save: what training has added, which a restarted script begins without."""
        for name, thing in things.items():
            new = thing.beside.new_parameters() if hasattr(thing, "beside") else []
            if new:
                self._warn(
                    f"parameters of {name}",
                    f"{name} gained parameters during training: {_some(new)}. A restarted script must "
                    "create them before it resumes, or this checkpoint will not load; hint: create "
                    "them all at the start, use them later",
                )
            groups = thing.added_groups() if hasattr(thing, "added_groups") else 0
            if groups:
                self._warn(
                    f"groups of {name}",
                    f"{name} gained {groups} parameter group{'s' if groups > 1 else ''} during "
                    "training. A restarted script must add them before it resumes, or this checkpoint "
                    "will not load; hint: create all groups at the start, parameters with "
                    "requires_grad=False are not stepped",
                )

    def look(self, objects: Mapping[str, object]) -> None:
        """Before a save: what belongs to the tracked objects. Where nothing was tracked or added it costs nothing."""
        optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        now = (
            len(objects),
            [len(group["params"]) for each in optimizers.values() for group in each.param_groups],
        )
        if now == self._looked_at:
            return
        self._looked_at = now
        with suppress(Exception):  # it only warns, and looks into objects of all kinds
            self._look_at_optimizers(optimizers, objects)
            self._look_at_metrics(objects)

    def _look_at_optimizers(
        self, optimizers: Mapping[str, torch.optim.Optimizer], objects: Mapping[str, object]
    ) -> None:
        known = {id(part) for each in objects.values() for part in _inside(each)} if optimizers else set()
        for name, optimizer in optimizers.items():
            lost = [
                f"parameter {number} of group {place}, {tuple(parameter.shape)}"
                for place, group in enumerate(optimizer.param_groups)
                for number, parameter in enumerate(group["params"])
                if parameter.requires_grad and id(parameter) not in known
            ]
            if lost:
                self._warn(
                    name,
                    f"{name} trains parameters that are not tracked, so they are neither saved nor restored: "
                    f"{_some(lost)}; hint: track them under a name of their own, or the module that they are in",
                )
        names = {id(optimizer): name for name, optimizer in optimizers.items()}
        for scheduler in _living_schedulers() if names else ():
            owner = names.get(id(getattr(scheduler, "optimizer", None)))
            if owner is not None and id(scheduler) not in known:
                kind = type(scheduler).__name__
                self._warn(
                    f"{kind} of {owner}",
                    f"a {kind} sets the learning rate of {owner} and is not tracked: it starts over after a resume; "
                    "hint: `run.track(scheduler=scheduler)`",
                )

    def _look_at_metrics(self, objects: Mapping[str, object]) -> None:
        for name, module in objects.items():
            if not isinstance(module, nn.Module) or forgets_its_counts(module):
                continue  # one that is tracked itself is saved whole
            lost = [path for path, part in module.named_modules() if forgets_its_counts(part)]
            if lost:
                self._warn(
                    f"metrics of {name}",
                    f"{name} has metrics whose counts are not saved: {_some(lost)}. The first value after a resume is "
                    "of what came after it; hint: track each under a name of its own",
                )

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._say(text)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _living_schedulers() -> list[LRScheduler]:
    """An optimizer does not know its own. By type: asking for `__class__` wakes what is loaded lazily."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]


def _inside(thing: object) -> Iterator[Any]:
    """It, what lies in it if it is a container, what its attributes hold, and a module's parameters."""
    ahead: list[tuple[object, int]] = [(thing, _DEPTH)]
    seen: set[int] = set()
    while ahead and len(seen) < _MOST_PARTS:
        here, left = ahead.pop()
        if id(here) in seen or isinstance(here, (str, bytes, int, float, type(None))):
            continue  # a history of losses is no place for a scheduler, and hides none
        seen.add(id(here))
        yield here
        if isinstance(here, nn.Module):
            yield from here.parameters()
        if not left or isinstance(here, (torch.Tensor, nn.Module, torch.optim.Optimizer)):
            continue
        if isinstance(here, Mapping):
            inner = list(here.values())
        elif isinstance(here, (list, tuple, deque)):
            inner = list(here)
        else:
            inner = list(getattr(here, "__dict__", {}).values())
        # Schedulers chain others, which chain others again; only a user's own objects may lead anywhere.
        further = left if isinstance(here, (LRScheduler, list, tuple)) else left - 1
        ahead += [(each, further) for each in reversed(inner)]
