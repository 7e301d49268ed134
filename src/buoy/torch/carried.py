"""What computing a loss leaves behind besides gradients, buffers and weights: a hidden state, a counter, a list.

A comparison of whole and parts must leave no trace there either; and where the next call reads what the last one
left, a batch is not the same as its parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from buoy.torch.homes import (
    HOOKS,
    NOTHING,
    Home,
    function_homes,
    is_container,
    is_generator,
    is_numpy,
    module_homes,
    object_homes,
    state_of,
)
from buoy.torch.undo import tensors_in

_MANY = 1 << 16  # entries of a container that may be copied for each computation
_FEW = 64  # entries of one whose tensors may be
_LARGE = 1 << 20  # bytes of a tensor that may be
_NEAR = 2  # containers in containers that are looked at: ((h, c), (h, c)), {"train": {"loss": []}}
_PLAIN = (bool, int, float, str, type(None))
STATE_HINT = (
    "put the state into the batch, detached: `(x, y, hidden)`, with one row per sample; what is one for all samples: "
    "change it once per batch, outside the loss function"
)


def keeps_state(name: str) -> str:
    """Why a batch cannot be cut.

    >>> keeps_state("hidden")
    'the loss function keeps a state from batch to batch, in `hidden`'
    """
    return f"the loss function keeps a state from batch to batch, in `{name}`"


@dataclass(slots=True)
class _Kept:
    home: Home
    name: str
    value: Any
    held: list[tuple[Any, Any]]
    """Where it is a container: it and those in it, each with a copy of what was in it."""
    tensors: list[tuple[torch.Tensor, int, torch.Tensor]]
    """In it, each with its version and a copy."""
    generator: tuple[Any, Callable[[], object]] | None = None
    """Where it stands and the way back, if it is a random generator."""
    array: Any = None
    """A copy, if it is numpy's."""

    @property
    def label(self) -> str:
        return self.home.label(self.name)

    def change(self) -> bool | None:
        """Whether it holds tensors or draws, if it was changed; None if it was not."""
        now = self.home.read(self.name)
        if now is not self.value:
            return _has_tensors(now) or _has_tensors(self.value)
        if self.generator is not None:
            return True if state_of(now)[0] != self.generator[0] else None
        if self.array is not None:
            return True if now.tobytes() != self.array.tobytes() else None
        if any(not _is_same(each, copy) for each, copy in self.held):
            return _has_tensors(now) or _has_tensors(self.held[0][1])
        return True if any(tensor._version != version for tensor, version, _ in self.tensors) else None

    def put_back(self) -> None:
        if self.home.read(self.name) is not self.value:
            self.home.write(self.name, self.value)
        if self.generator is not None:
            self.generator[1]()
        if self.array is not None:
            self.value[...] = self.array
        for each, copy in self.held:
            if not _is_same(each, copy):
                each.clear()
                (each.extend if isinstance(each, (list, deque)) else each.update)(copy)
        with _disable_current_modes(), torch.no_grad():
            for number, (tensor, version, copy) in enumerate(self.tensors):
                if tensor._version != version:
                    tensor.copy_(copy)
                    self.tensors[number] = (tensor, tensor._version, copy)


class Carried:
    """Copied before a computation, and put back after it.

    For a comparison everything; for a step, of which a failed try must leave no state, what holds tensors and was seen
    to change in the first step of its loss function, and the numbers beside it: that a table is made, and for how many
    places, stands in them. To look everywhere at each step would cost more than it may.
    """

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._objects: list[object] = []
        self._watched: list[Home] | None = None
        self._watched_states: list[tuple[Home, str]] = []
        self._ids: set[int] = set()
        self._loss_fn: Any = None
        self._known: set[Any] = set()
        """Code of loss functions of which a step was looked at."""
        self._states: set[str] = set()
        """What holds tensors and changes from step to step."""
        self._kept: list[_Kept] = []
        self._open: list[tuple[Home, set[str]]] = []
        self._keepers: list[tuple[int, dict[str, Any]]] | None = None
        """Modules that have buffers or such a state, with their attributes."""
        self._numbers: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        """Of these: attributes, and the plain ones among them as they were."""
        self.moved: dict[str, bool] = {}
        """What comparisons have changed since this was emptied, and whether it holds tensors or draws."""
        self.generators: set[str] = set()
        """Random generators of the person's own, among these."""

    def watch(self, modules: Iterable[torch.nn.Module], objects: Iterable[object] = ()) -> None:
        """The attributes of these count, whatever the loss function is."""
        self._modules += modules
        self._objects += objects
        self._watched = self._keepers = None

    def of(self, loss_fn: Any) -> None:
        """The loss function of the next computations; None: there are none for now."""
        self._loss_fn = loss_fn
        if loss_fn is None:
            self._kept, self._open, self._numbers = [], [], []

    def take(self, *, is_step: bool) -> None:
        """Copy what the next computation may change."""
        self._kept, self._open, self._numbers = [], [], []
        every = not is_step or self._code() not in self._known
        with suppress(Exception):  # somebody's container that cannot be copied: what comes before it is kept
            if not every:
                self._numbers = [(owner, own, _plain(own)) for owner, own in self._find_keepers()]
                places = self._state_places() if self._states else []
                self._kept = [_kept(home, name) for home, name in places]
                return
            for home in self._homes():
                names = home.names()
                self._kept += [_kept(home, name) for name in names]
                if home.is_open:
                    self._open.append((home, names))

    def put_back(
        self, *, is_step: bool, only: frozenset[str] | None = None, replaced: frozenset[int] = frozenset()
    ) -> None:
        """As it was; of a step that failed only what holds tensors, as by the rest a person may tell tries apart.

        `replaced`: modules, by id, whose buffers were put back. Where tensors go back, the numbers beside them do.
        """
        changed = [(kept, kept.change()) for kept in self._kept if only is None or kept.label in only]
        new = [
            (home, name, _has_tensors(home.read(name)))
            for home, names in self._open
            for name in home.names() - names
            if only is None or home.label(name) in only
        ]
        touched = {kept.home.owner for kept, has_tensors in changed if has_tensors}
        touched = (touched | {home.owner for home, _, has_tensors in new if has_tensors} | replaced) - {0}
        touched |= {HOOKS} if touched else set()  # whether they are installed may be one of these numbers
        for kept, has_tensors in changed:
            if has_tensors is not None:
                self._note(kept.label, has_tensors, is_step)
                if kept.generator is not None:
                    self.generators.add(kept.label)
                if has_tensors or not is_step or kept.home.owner in touched:
                    with suppress(Exception):  # somebody's container that cannot be filled again
                        kept.put_back()
        for home, name, has_tensors in new:
            self._note(home.label(name), has_tensors, is_step)
            if has_tensors or not is_step or home.owner in touched:
                home.write(name, NOTHING)
        for owner, own, numbers in self._numbers:
            if owner in touched:
                own.update(numbers)

    def done(self) -> None:
        """A step went through: what it has left is what the next one begins with."""
        code = self._code()
        if code in self._known:
            return
        self._known.add(code)
        states = {kept.label for kept in self._kept if kept.change()}
        for home, names in self._open:
            new = home.names() - names
            states |= {home.label(name) for name in new if _has_tensors(home.read(name))}
        if states - self._states:
            self._states |= states
            self._watched_states, self._keepers = self._among(self._watched or []), None

    def forgetting(self, loss_fn: Callable[[Any], Any], names: Iterable[str]) -> Callable[[Any], Any]:
        """The loss function, each call of which finds there what the first one found."""
        only = frozenset(names)

        def forgets(part: Any) -> Any:
            self.put_back(is_step=False, only=only)
            return loss_fn(part)

        return forgets

    def state_of(self, samples: int) -> str | None:
        """Where something with so many rows is kept from step to step."""
        for home, name in self._state_places() if self._states else []:
            if any(samples in tensor.shape for tensor in tensors_in(home.read(name), _NEAR)):
                return home.label(name)
        return None

    def _state_places(self) -> list[tuple[Home, str]]:
        return self._watched_states + self._among(function_homes(self._loss_fn, self._ids))

    def _among(self, homes: list[Home]) -> list[tuple[Home, str]]:
        return [(home, name) for home in homes for name in home.names() if home.label(name) in self._states]

    def _find_keepers(self) -> list[tuple[int, dict[str, Any]]]:
        if self._keepers is None:
            states = {home.owner for home, _ in self._watched_states}
            parts = {id(part): part for module in self._modules for part in module.modules()}
            self._keepers = [
                (owner, vars(part))
                for owner, part in parts.items()
                if (part._buffers or owner in states) and not type(part).__module__.startswith("torch.")
            ]
        return self._keepers

    def _note(self, label: str, has_tensors: bool, is_step: bool) -> None:
        if not is_step:
            self.moved[label] = self.moved.get(label, False) or has_tensors

    def _homes(self) -> list[Home]:
        if self._watched is None:
            self._watched = [home for module in self._modules for home in module_homes(module)]
            self._watched += [home for thing in self._objects for home in object_homes(thing)]
            self._ids = {id(part) for module in self._modules for part in module.modules()}
            self._ids |= {id(thing) for thing in self._objects}
        return self._watched + function_homes(self._loss_fn, self._ids)

    def _code(self) -> Any:
        return code_of(self._loss_fn)


def code_of(loss_fn: Any) -> Any:
    """The same for a lambda that is written anew for each batch."""
    return getattr(loss_fn, "__code__", type(loss_fn))


def _kept(home: Home, name: str) -> _Kept:
    value = home.read(name)
    is_copied = is_container(value) and len(value) <= _MANY
    held = [(each, _copy(each)) for each in _containers(value, _NEAR, home.is_inner)] if is_copied else []
    tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
    if isinstance(value, torch.Tensor) or ((type(value) is tuple or is_copied) and len(value) <= _FEW):
        tensors = [
            (tensor, tensor._version, tensor.detach().clone())
            for tensor in tensors_in(value, _NEAR)
            if _can_be_copied(tensor)
        ]
    generator = state_of(value) if is_generator(value) else None
    is_table = (
        is_numpy(value) and value.nbytes <= _LARGE and value.flags.writeable and not value.dtype.hasobject
    )
    return _Kept(home, name, value, held, tensors, generator, value.copy() if is_table else None)


def _containers(value: Any, depth: int, is_inner: bool) -> Iterator[Any]:
    """It and those in it; of an object in an object few and small ones, as it may be a dataset with all its samples."""
    yield value
    if not depth or (is_inner and len(value) > _FEW):
        return
    for each in value.values() if isinstance(value, dict) else value:
        if is_container(each) and len(each) <= (_MANY // _FEW if is_inner else _MANY):
            yield from _containers(each, depth - 1, is_inner)


def _plain(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if type(value) in _PLAIN}


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Weights are kept elsewhere."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_inference():
        return False
    return tensor.nbytes <= _LARGE


def _copy(value: Any) -> Any:
    """Plain ones: what a derived class does when it is copied is not known."""
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _is_same(now: Any, held: Any) -> bool:
    """The same things in the same order."""
    if len(now) != len(held):
        return False
    if isinstance(held, dict):
        return all(a is b and now[a] is held[b] for a, b in zip(now, held, strict=True))
    return now == held if isinstance(held, set) else all(a is b for a, b in zip(now, held, strict=True))


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value, _NEAR), None) is not None
