"""Where a function can keep something from call to call: attributes, variables around it, globals, its own object."""

from __future__ import annotations

import dis
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch

NOTHING: Any = object()
"""Stands for a name without a value."""
_DEPTH = 3  # functions that a loss function calls by a name of its own: mostly one or two
_FEW = 64  # entries of a container that may be objects of the person's own
_NOT_OURS = ("torch", "buoy", "builtins", "threading", "queue", "logging")
_TRAINERS = ("lightning", "pytorch_lightning", "transformers", "accelerate")
"""Whose objects a model may refer to: its trainer, its configuration."""
_SHARED = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition)
_OF_TORCH = frozenset(vars(torch.nn.Module()))
_HOOKS = sorted(name for name in _OF_TORCH if name.startswith(("_forward", "_backward")) and "hooks" in name)
HOOKS = -1
"""Stands for the owner of hooks: who has them installed notes that in another module."""


class Home(Protocol):
    """A place with names."""

    is_open: bool
    """Names that appear are new ones of its own."""
    owner: int
    """The module it is a part of, by id; 0: none."""
    is_inner: bool
    """Of an object in an object, which may be a dataset as well as a meter: only what is small there is looked at."""

    def names(self) -> set[str]:
        """Those that it has, or may get."""

    def label(self, name: str) -> str:
        """In words."""

    def read(self, name: str) -> Any:
        """Its value, or NOTHING."""

    def write(self, name: str, value: Any) -> None:
        """NOTHING takes the name away."""


class Names:
    """Names in a dict: attributes of an object, or some globals."""

    def __init__(
        self,
        path: str,
        values: dict[str, Any],
        only: frozenset[str] | None = None,
        owner: int = 0,
        is_inner: bool = False,
    ) -> None:
        self._path, self._values, self._only = path, values, only
        self.is_open, self.owner, self.is_inner = only is None, owner, is_inner

    def names(self) -> set[str]:
        """Those that it has, or may get."""
        if self._only is not None:
            return set(self._only)
        return self._values.keys() - _OF_TORCH

    def label(self, name: str) -> str:
        """In words."""
        return f"{self._path}.{name}" if self._path else name

    def read(self, name: str) -> Any:
        """Its value, or NOTHING."""
        return self._values.get(name, NOTHING)

    def write(self, name: str, value: Any) -> None:
        """NOTHING takes the name away."""
        if value is NOTHING:
            self._values.pop(name, None)
        else:
            self._values[name] = value


class Cell:
    """A variable of an enclosing function."""

    is_open, owner, is_inner = False, 0, False

    def __init__(self, name: str, cell: CellType) -> None:
        self._name, self._cell = name, cell

    def names(self) -> set[str]:
        """Those that it has, or may get."""
        return {self._name}

    def label(self, name: str) -> str:
        """In words."""
        return name

    def read(self, name: str) -> Any:
        """Its value, or NOTHING."""
        try:
            return self._cell.cell_contents
        except ValueError:
            return NOTHING

    def write(self, name: str, value: Any) -> None:
        """NOTHING takes the name away."""
        if value is NOTHING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


class Reached:
    """A module that a loss function knows by a name; it keeps nothing here itself."""

    is_open, owner, is_inner = False, 0, False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def names(self) -> set[str]:
        """None."""
        return set()

    def label(self, name: str) -> str:
        """In words."""
        return name

    def read(self, name: str) -> Any:
        """Nothing is here."""
        return NOTHING

    def write(self, name: str, value: Any) -> None:
        """Nothing is here."""


class Hooks:
    """What is called with a module: some are installed by the first forward pass, and noted elsewhere as installed."""

    is_open, owner, is_inner = True, HOOKS, False

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self._path, self._kinds = path, {kind: vars(module)[kind] for kind in _HOOKS if kind in vars(module)}

    def names(self) -> set[str]:
        """Those that it has."""
        return {f"{kind} {number}" for kind, hooks in self._kinds.items() if hooks for number in hooks}

    def label(self, name: str) -> str:
        """In words."""
        return f"a hook of {self._path}" if self._path else "a hook"

    def read(self, name: str) -> Any:
        """Its value, or NOTHING."""
        hooks, number = self._place(name)
        return hooks.get(number, NOTHING)

    def write(self, name: str, value: Any) -> None:
        """NOTHING takes the name away."""
        hooks, number = self._place(name)
        if value is NOTHING:
            hooks.pop(number, None)
        else:
            hooks[number] = value

    def _place(self, name: str) -> tuple[dict[int, Any], int]:
        kind, _, number = name.partition(" ")
        return self._kinds[kind], int(number)


def module_homes(module: torch.nn.Module) -> list[Home]:
    """Attributes of a module, of those in it, and of objects that it keeps; and hooks.

    PyTorch's own modules keep nothing in attributes, but make their weights late.
    """
    found: list[Home] = []
    seen: set[int] = set()
    for path, part in module.named_modules():
        found.append(Hooks(path, part))
        if type(part).__module__.startswith("torch."):
            continue
        own = (vars(part), part._modules, part._parameters)
        found += [Names(path, values, owner=id(part)) for values in own]
        for name in vars(part).keys() - _OF_TORCH:
            value = vars(part)[name]
            if id(value) not in seen and type(value).__module__.partition(".")[0] not in _TRAINERS:
                seen.add(id(value))
                found += _of_things(f"{path}.{name}".lstrip("."), value)
    return found


def function_homes(function: Any, besides: set[int]) -> list[Home]:
    """Of a loss function, and of what it reaches by a name; but for these modules, by id."""
    return list(_of_value("", function, set(besides), _DEPTH))


def function_modules(function: Any) -> list[torch.nn.Module]:
    """Those that it knows by a name: models, teachers, losses that keep something."""
    homes = _of_value("", function, set(), _DEPTH)
    return list({id(home.module): home.module for home in homes if isinstance(home, Reached)}.values())


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def object_homes(thing: object) -> list[Home]:
    """Its attributes."""
    return list(_of_object("", thing))


def _of_value(label: str, value: Any, seen: set[int], depth: int) -> Iterator[Home]:
    if id(value) in seen or depth < 0 or isinstance(value, (type, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        yield from _of_value(label, value.func, seen, depth)
        given = {f"argument {number + 1}": argument for number, argument in enumerate(value.args)}
        given |= value.keywords
        yield Names("", given, frozenset(given))  # only what is in them can be changed
        for name, argument in given.items():
            yield from _of_value(name, argument, seen, depth - 1)
    elif isinstance(value, MethodType):
        yield from _of_value(label or "self", value.__self__, seen, depth)
        yield from _of_value(label, value.__func__, seen, depth)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, seen, depth)
    elif isinstance(value, torch.nn.Module):
        yield Reached(value)
        yield from module_homes(value)
    else:
        yield from _of_things(label, value)
        if callable(value) and not _is_of_others(value):
            yield from _of_value(label, getattr(value.__call__, "__func__", None), seen, depth - 1)


def _of_function(function: FunctionType, seen: set[int], depth: int) -> Iterator[Home]:
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if id(cell) not in seen:
            seen.add(id(cell))
            home = Cell(name, cell)
            yield home
            yield from _of_value(name, home.read(name), seen, depth - 1)
    given = dict(
        zip(
            reversed(code.co_varnames[: code.co_argcount]),
            reversed(function.__defaults__ or ()),
            strict=False,
        )
    )
    given |= function.__kwdefaults__ or {}
    if given:
        yield Names("", given, frozenset(given))  # only what is in them can be changed
        for name, value in given.items():
            yield from _of_value(name, value, seen, depth - 1)
    read = {name: known[name] for name in _read(code) if name in known}
    kept = _assigned(code) | {
        name
        for name, value in read.items()
        if is_container(value) or is_generator(value) or isinstance(value, torch.Tensor) or is_numpy(value)
    }
    if kept:
        yield Names("", known, frozenset(kept))
    for name, value in read.items():
        # A library's functions are its own affair.
        if not isinstance(value, FunctionType) or value.__globals__ is known:
            yield from _of_value(name, value, seen, depth - 1)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _of_value("", wrapped, seen, depth)


def _of_object(label: str, thing: object, nested: bool = False) -> Iterator[Home]:
    """And of those that it keeps: a trainer's meters. What another thread may be writing to is left alone."""
    values = getattr(thing, "__dict__", None)
    if type(values) is not dict or _is_of_others(thing):
        return
    if any(isinstance(value, _SHARED) for value in values.values()):
        return
    yield Names(label, values, is_inner=nested)
    yield from (Reached(value) for value in values.values() if isinstance(value, torch.nn.Module))
    for name, value in () if nested else list(values.items()):
        yield from _of_things(f"{label}.{name}".lstrip("."), value, nested=True)


def _of_things(label: str, value: Any, nested: bool = False) -> list[Home]:
    """Of it and what is in it; of somebody's object that cannot be looked into, nothing."""
    found: list[Home] = []
    with suppress(Exception):
        for thing in _things_in(value):
            # What was written to a file stays there. The class is asked: an object may answer with anything.
            if not nested or not (_is_code(thing) or hasattr(type(thing), "write")):
                with suppress(Exception):
                    found += _of_object(label, thing, nested)
    return found


def _things_in(value: Any) -> list[Any]:
    """It; or of a container, such as a dict of meters, what is in it."""
    if not is_container(value):
        return [value]
    if len(value) > _FEW:
        return []
    return [
        value,
        *(each for each in (value.values() if isinstance(value, dict) else value) if not _is_code(each)),
    ]


def _is_code(value: object) -> bool:
    """Or a model, or a trainer's: looked at elsewhere, or not at all."""
    kinds = (torch.nn.Module, type, ModuleType, FunctionType, MethodType)
    return isinstance(value, kinds) or type(value).__module__.partition(".")[0] in _TRAINERS


def _is_of_others(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] in _NOT_OURS


def is_container(value: object) -> bool:
    """Something that can be emptied and filled again."""
    return isinstance(value, (list, dict, set, deque))


def is_numpy(value: object) -> bool:
    """An array of numpy's: a table of confusions, sums of a metric."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: object) -> bool:
    """A random generator of the person's own: torch's, numpy's or Python's."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def state_of(generator: Any) -> tuple[Any, Callable[[], object]]:
    """Where it stands, to be compared, and the way back there."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return bytes(state.numpy()), lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        now = generator.getstate()
        return now, lambda: generator.setstate(now)
    bits = getattr(generator, "bit_generator", None)
    if bits is None:
        old = generator.get_state(legacy=False)
        return repr(old), lambda: generator.set_state(old)
    kept = bits.state
    return repr(kept), lambda: setattr(bits, "state", kept)


def _read(code: CodeType) -> frozenset[str]:
    """Globals that it reads."""
    return _globals(code, "LOAD_GLOBAL")


def _assigned(code: CodeType) -> frozenset[str]:
    """Globals that it assigns."""
    return _globals(code, "STORE_GLOBAL")


@functools.lru_cache(maxsize=512)
def _globals(code: CodeType, how: str) -> frozenset[str]:
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname == how}
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(found).union(*(_globals(each, how) for each in inner))
