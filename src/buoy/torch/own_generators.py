"""The generators of random numbers that a person's data code holds or names, wherever it keeps them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from buoy.torch.rng import generator_state, global_generators

_MOST_PARTS = 2000
_MOST_MEMBERS = 64
_PLAIN = (str, bytes, int, float, torch.Tensor, types.ModuleType)


def own_generators(*owners: object) -> list[Any]:
    """Those that objects and what they are made of hold: a dataset's, its transforms', a collate function's.

    Also those that their code takes from around it: a closure's, and the `rng = numpy.random.default_rng()` at the top
    of a script. Always in the same order.

    >>> import random
    >>> rng = random.Random(1)
    >>> own_generators(lambda: rng.random()) == [rng]
    True
    """
    found: dict[int, Any] = {}
    seen = {id(generator) for generator in global_generators()}
    left: list[object] = list(reversed(owners))
    while left and len(seen) < _MOST_PARTS:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, _PLAIN):
            continue
        seen.add(id(thing))
        if generator_state(thing) is not None:
            found[id(thing)] = thing
        else:
            left += _parts(thing)
    return list(found.values())


def _parts(thing: Any) -> list[object]:
    if isinstance(thing, (list, tuple)):
        return list(thing[:_MOST_MEMBERS])
    if isinstance(thing, dict):
        return list(thing.values())[:_MOST_MEMBERS]
    if isinstance(thing, types.FunctionType):
        return list(_named_by(thing)) if is_a_persons(thing) else []
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, type):
        return _methods(thing) if is_a_persons(thing) else []
    parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        parts += [getattr(thing, name) for name in names if name[:2] != "__" and hasattr(thing, name)]
    return [*parts, *(kind for kind in type(thing).__mro__ if is_a_persons(kind))]


def _methods(kind: type) -> list[object]:
    held = (getattr(value, "__func__", value) for value in vars(kind).values())  # also of a staticmethod
    return [value for value in held if isinstance(value, types.FunctionType) or _is_generator(value)]


def _named_by(function: types.FunctionType) -> Iterator[object]:
    """What its code finds around it: in the closure, in its defaults, and among the names of its own module."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if _is_generator(value) or isinstance(value, types.FunctionType):
            yield value


def _is_generator(value: object) -> bool:
    return generator_state(value) is not None


def is_a_persons(code: Any) -> bool:
    """Not a library's: what that draws from is given to it, or is global."""
    module = sys.modules.get(code.__module__ or "")
    file = getattr(module, "__file__", None) or ""
    return module is not None and not any(part in file for part in _INSTALLED) and not _is_built_in(module)


_INSTALLED = ("site-packages", "dist-packages")
_LIBRARY = tuple({sys.prefix + "/lib/", sys.base_prefix + "/lib/"})


def _is_built_in(module: types.ModuleType) -> bool:
    file: str | None = getattr(module, "__file__", None)
    if file is None:  # a notebook's `__main__` has no file either
        return module.__name__ != "__main__"
    return file.startswith(_LIBRARY)
