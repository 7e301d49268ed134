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
    NOTHING,
    Home,
    function_homes,
    is_container,
    is_generator,
    module_homes,
    object_homes,
    state_of,
)  # fmt: skip
from buoy.torch.undo import tensors_in

_MANY = 1 << 16  # entries of a container that may be copied for each computation
_FEW = 64  # entries of one whose tensors may be
_LARGE = 1 << 20  # bytes of a tensor that may be
_NEAR = 2  # containers in containers in which a state is looked for: ((h, c), (h, c))
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
    held: Any
    """A copy of what was in it, where it is a container."""
    tensors: list[tuple[torch.Tensor, int, torch.Tensor]]
    """In it, each with its version and a copy."""
    inner: list[tuple[Any, Any]]
    """Containers in it (`metrics["train"]["accuracy"]`), each with a copy of what was in it."""
    generator: tuple[Any, Callable[[], object]] | None = None
    """Where it stands and the way back, if it is a random generator."""

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
        if self.held is not None and not _is_same(now, self.held):
            return _has_tensors(now) or _has_tensors(self.held)
        return True if any(tensor._version != version for tensor, version, _ in self.tensors) else None

    def put_back(self) -> None:
        if self.home.read(self.name) is not self.value:
            self.home.write(self.name, self.value)
        if self.generator is not None:
            self.generator[1]()
        if self.held is not None:
            _refill(self.value, self.held)
        with _disable_current_modes(), torch.no_grad():
            for number, (tensor, version, copy) in enumerate(self.tensors):
                if tensor._version != version:
                    tensor.copy_(copy)
                    self.tensors[number] = (tensor, tensor._version, copy)

    def put_back_inner(self) -> None:
        for container, held in self.inner:
            _refill(container, held)


class Carried:
    """Copied before a computation, and put back after it.

    For a comparison everything; for a step, of which a failed try must leave no state, what holds tensors and was seen
    to change in the first step of its loss function. To look everywhere at each step would cost more than it may.
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
        self.moved: dict[str, bool] = {}
        """What comparisons have changed since this was emptied, and whether it holds tensors or draws."""
        self.generators: set[str] = set()
        """Random generators of the person's own, among these."""

    def watch(self, modules: Iterable[torch.nn.Module], objects: Iterable[object] = ()) -> None:
        """The attributes of these count, whatever the loss function is."""
        self._modules += modules
        self._objects += objects
        self._watched = None

    def of(self, loss_fn: Any) -> None:
        """The loss function of the next computations; None: there are none for now."""
        self._loss_fn = loss_fn
        if loss_fn is None:
            self._kept, self._open = [], []

    def take(self, *, is_step: bool) -> None:
        """Copy what the next computation may change."""
        self._kept, self._open = [], []
        every = not is_step or self._code() not in self._known
        if not every and not self._states:
            return
        with suppress(Exception):  # somebody's container that cannot be copied: what comes before it is kept
            if not every:
                self._kept = [_kept(home, name) for home, name in self._state_places()]
                return
            for home in self._homes():
                names = home.names()
                self._kept += [_kept(home, name) for name in names]
                if home.is_open:
                    self._open.append((home, names))

    def put_back(self, *, is_step: bool, only: frozenset[str] | None = None) -> None:
        """As it was; of a step that failed only what holds tensors, as by the rest a person may tell tries apart."""
        for kept in self._kept:
            if only is not None and kept.label not in only:
                continue
            has_tensors = kept.change()
            with suppress(Exception):  # somebody's container that cannot be filled again
                if has_tensors is not None:
                    self._note(kept.label, has_tensors, is_step)
                    if kept.generator is not None:
                        self.generators.add(kept.label)
                    if has_tensors or not is_step:
                        kept.put_back()
                if not is_step:
                    kept.put_back_inner()
        for home, names in self._open:
            for name in home.names() - names:
                has_tensors = _has_tensors(home.read(name))
                if only is None or home.label(name) in only:
                    self._note(home.label(name), has_tensors, is_step)
                    if has_tensors or not is_step:
                        home.write(name, NOTHING)

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
            self._watched_states = self._among(self._watched or [])

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
    held = _copy(value) if is_copied else None
    tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
    if isinstance(value, torch.Tensor) or ((type(value) is tuple or is_copied) and len(value) <= _FEW):
        tensors = [
            (tensor, tensor._version, tensor.detach().clone())
            for tensor in tensors_in(value, _NEAR)
            if _can_be_copied(tensor)
        ]
    inner = list(_inside(value, _NEAR)) if is_copied else []
    return _Kept(home, name, value, held, tensors, inner, state_of(value) if is_generator(value) else None)


def _inside(value: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """The containers in a small one, with copies."""
    if not depth or not is_container(value) or len(value) > _FEW:
        return
    for each in value.values() if isinstance(value, dict) else value:
        if is_container(each) and len(each) <= _MANY:
            yield each, _copy(each)
            yield from _inside(each, depth - 1)


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Weights are kept elsewhere."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_inference():
        return False
    return tensor.nbytes <= _LARGE


def _copy(value: Any) -> Any:
    """Plain ones: what a derived class does when it is copied is not known."""
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _refill(container: Any, held: Any) -> None:
    if not _is_same(container, held):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(held)


def _is_same(now: Any, held: Any) -> bool:
    """The same things in the same order; what is in these is not looked at."""
    if len(now) != len(held):
        return False
    if isinstance(held, dict):
        return all(a is b and now[a] is held[b] for a, b in zip(now, held, strict=True))
    return now == held if isinstance(held, set) else all(a is b for a, b in zip(now, held, strict=True))


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value, _NEAR), None) is not None
