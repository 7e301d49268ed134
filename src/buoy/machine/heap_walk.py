"""From where people keep things to the things themselves, with the name that they would call them by.

Python's collector does not know an array, nor a dict or a tuple that has only such things in it: they are found only by
going from one object to the next.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Named = tuple[Any, str | None, bool]
"""A thing, the name of what it is in, and whether that is its own name; None: nothing that people would call it."""

FRAMES, IN_FRAME = ("DataFrame", "Series"), " (data frame)"
_DEPTH = 16
_NAMED_KEYS = 16
"""A dict with more keys than these is one thing to people, not many."""
_BETWEEN_LOOKS = 512
_LEAVES = (
    int, float, complex, bool, str, bytes, bytearray, type(None), type(Ellipsis), types.ModuleType, types.FrameType,
    types.TracebackType, types.CodeType, types.BuiltinFunctionType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_PYTHON = tuple(sysconfig.get_path(which) + os.sep for which in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Walk:
    """Visits everything that can be reached, nearest first and each once, until its time or its number is used up."""

    def __init__(
        self,
        is_wanted: Callable[[type], bool],
        found: Callable[[Any, str | None], None],
        seconds: float,
        most: int,
    ) -> None:
        self._is_wanted, self._found = is_wanted, found
        self._until, self._most = time.thread_time() + seconds, most
        self._visited: set[int] = set()
        self._is_leaf: dict[type, bool] = {}
        self._is_of_person: dict[type, bool] = {}
        self._attribute_names: dict[type, list[str]] = {}
        self.is_partial = False
        self.aside: list[Named] = []
        """What is in objects of ours: it may be anybody's, so it is asked for last."""

    def leave_out(self, things: Iterable[Any]) -> None:
        """Do not go through these: too much hangs on them."""
        self._visited.update(map(id, things))

    def go(self, roots: Iterable[Named], *, keep_name: bool = False) -> None:
        """Tell of everything that is new in these; `keep_name`: by the root's name, whatever it is in."""
        waiting: deque[tuple[Any, str | None, bool, int]] = deque()
        self._put(waiting, roots, 0)
        while waiting and not self.is_partial:
            thing, name, is_exact, depth = waiting.popleft()
            kind = type(thing)
            if self._is_wanted(kind):
                self._found(thing, name)
            if depth < _DEPTH:
                children = self._children(thing, kind, name, is_exact)
                if keep_name:
                    children = ((child, name, False) for child, _, _ in children)
                try:
                    self._put(waiting, children, depth + 1)
                except Exception:  # noqa: BLE001 - half-built, or changed by another thread meanwhile
                    continue

    def _put(
        self, waiting: deque[tuple[Any, str | None, bool, int]], things: Iterable[Named], depth: int
    ) -> None:
        """Those that may have something in them, and were not there yet."""
        for thing, name, is_exact in things:
            if self._leaf(type(thing)) or id(thing) in self._visited:
                continue
            self._visited.add(id(thing))
            waiting.append((thing, name, is_exact, depth))
            if not len(self._visited) % _BETWEEN_LOOKS:
                self.is_partial |= time.thread_time() > self._until or len(self._visited) > self._most

    def is_of_person(self, kind: type) -> bool:
        """Whether a class is the person's own, not a library's."""
        if kind not in self._is_of_person:
            module = sys.modules.get(kind.__module__) if isinstance(kind.__module__, str) else None
            self._is_of_person[kind] = module is not None and is_module_of_person(module)
        return self._is_of_person[kind]

    def _children(self, thing: Any, kind: type, name: str | None, is_exact: bool) -> Iterator[Named]:
        if is_exact and issubclass(kind, dict) and len(thing) <= _NAMED_KEYS:
            for key, value in list(dict.items(thing)):
                yield value, *((_item(name, key), True) if name and type(key) is str else (name, False))
        elif kind is types.FunctionType:
            yield from _of_function(thing, name)
        elif issubclass(kind, _GENERATORS):
            frame = next(
                (getattr(thing, at) for at in ("gi_frame", "cr_frame", "ag_frame") if hasattr(thing, at)),
                None,
            )
            yield from variables(frame) if frame is not None else ()
        elif issubclass(kind, type):
            if self.is_of_person(thing):
                yield from (
                    (value, f"{thing.__name__}.{at}", True) for at, value in list(vars(thing).items())
                )
        elif self.is_of_person(kind):
            yield from self._attributes(thing, kind, name)
            yield from ((value, name or kind.__name__, False) for value in self._inside(thing))
        else:
            inside = name
            if name is not None and kind.__module__.partition(".")[0] == "buoy":
                self.aside += [(value, None, False) for value in self._inside(thing)]
                return
            if kind.__name__ in FRAMES:
                inside = "other data frames" if name is None else f"{name}{IN_FRAME}"
            yield from ((value, inside, False) for value in self._inside(thing))

    def _inside(self, thing: Any) -> list[Any]:
        """What it refers to, unless all of that are leaves: there are lists of millions of numbers."""
        inside = gc.get_referents(thing)
        kinds = set(map(type, inside))
        return [] if all(map(self._leaf, kinds)) else inside

    def _leaf(self, kind: type) -> bool:
        if kind not in self._is_leaf:
            self._is_leaf[kind] = issubclass(kind, _LEAVES)
        return self._is_leaf[kind]

    def _attributes(self, thing: Any, kind: type, name: str | None) -> Iterator[Named]:
        """`Dataset.images`; what a library's base class keeps for itself goes by the name of the whole."""
        names = self._attribute_names.get(kind)
        if names is None:  # only once per class: to ask each instance for its dict would make one for it
            slots = [at for base in kind.__mro__ for at in base.__dict__.get("__slots__", ())]
            names = self._attribute_names[kind] = [*getattr(thing, "__dict__", ()), *slots]
        has_own_storage = any(
            "__setattr__" in base.__dict__ and base is not object and not self.is_of_person(base)
            for base in kind.__mro__
        )
        for at in names:
            try:
                value = object.__getattribute__(thing, at)
            except AttributeError:
                continue
            if has_own_storage and at.startswith("_"):
                yield value, name or kind.__name__, False
            else:
                yield value, f"{kind.__name__}.{at}", True


def variables(frame: types.FrameType) -> list[Named]:
    """A frame's local variables; those of a library's code have no name that people know."""
    code, items = frame.f_code, frame_items(frame)
    if is_library(code.co_filename):
        return [(value, None, False) for _, value in items]
    place = code.co_qualname.rpartition("<locals>.")[2]
    return [(value, f"{name} in {place}()", True) for name, value in items]


def frame_items(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The names and values of a frame's local variables; the frame keeps no copy of them."""
    found = frame.f_locals
    items = list(found.items())
    if sys.version_info < (3, 13) and is_function(frame) and sys.getrefcount(found) == 3:
        # The frame would keep this copy, and with it what the variables are now, until it ends.
        found.clear()
    return items


def is_function(frame: types.FrameType) -> bool:
    """Whether its variables are its own: those of a script or a cell are the module's."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def is_module_of_person(module: types.ModuleType) -> bool:
    """A script, a notebook, or a module beside them."""
    if module.__name__ == "__main__":
        return True
    file = module.__dict__.get("__file__")
    return isinstance(file, str) and not is_library(file)


def is_library(file: str) -> bool:
    """Whether code of this file is an installed package's, Python's or ours."""
    return file.startswith(("<frozen", OURS, *_PYTHON)) or any(folder in file for folder in _PACKAGES)


def _item(name: str, key: str) -> str:
    """`data["images"] in main()`."""
    variable, in_, place = name.partition(" in ")
    return f'{variable}["{key}"]{in_}{place}'


def _of_function(function: Any, name: str | None) -> Iterator[Named]:
    place = function.__qualname__.partition(".<locals>")[0]
    is_known = not is_library(function.__code__.co_filename)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield cell.cell_contents, f"{variable} in {place}()" if is_known else name, is_known
        except ValueError:  # not assigned yet
            continue
    for more in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        if more:
            yield more, name, False
