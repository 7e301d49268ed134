"""The user's dataset, with its randomness made a function of the place in the epoch; runs inside the data workers.

The generators of random numbers that the user's data code holds or names, wherever it keeps them.

Loaders that a training iterates over by itself (its evaluation's) draw as much in a new process as in an old one.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from buoy._compat.torch import WORKERS_BEGIN, worker_iterators
from buoy.flight.last_words import leave_out_ours
from buoy.machine.process import leave_group
from buoy.torch.data.rng import (
    generator_state,
    global_generators,
    seed_everything,
    seed_generator,
)

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
        return list(_named_by(thing)) if is_the_users(thing) else []
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, type):
        return _methods(thing) if is_the_users(thing) else []
    parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        parts += [getattr(thing, name) for name in names if name[:2] != "__" and hasattr(thing, name)]
    return [*parts, *(kind for kind in type(thing).__mro__ if is_the_users(kind))]


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


def is_the_users(code: Any) -> bool:
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


Key = tuple[int, Any]
"""What the order hands to a `SeededDataset`: the number to seed with, and the user's own index."""

_MASK = (1 << 64) - 1


def spread(number: int) -> int:
    """Neighbouring numbers become unrelated seeds (the last step of splitmix64)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


class SeededDataset(Dataset[Any]):
    """Seeds python's, numpy's and torch's global generators before each item, so that an augmentation in a worker
    gives the same again whoever loads it, however many workers there are. Generators that the dataset, its transforms
    or what stands `beside` it (the collate function) have of their own are seeded too.

    In the training's own process the caller puts the training's random state back afterwards.
    """

    def __init__(self, dataset: Any, beside: object = None) -> None:
        self.inner = dataset
        self._beside = beside
        self._own: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "_beside": self._beside, "_own": None}  # a worker looks for itself

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: Key) -> Any:
        number, index = key
        self._seed(number)
        try:
            return self.inner[index]
        except BaseException as error:
            leave_out_ours(error)
            raise

    @property
    def __getitems__(self) -> Callable[[list[Key]], Any] | None:
        # torch asks for this name, and takes it for absent when it is None.
        return self._get_items if getattr(self.inner, "__getitems__", None) else None

    def look_again(self) -> None:
        """A new pass: the dataset may have been given other generators."""
        self._own = None

    def _get_items(self, keys: list[Key]) -> Any:
        self._seed(keys[0][0])
        try:
            return self.inner.__getitems__([index for _, index in keys])
        except BaseException as error:
            leave_out_ours(error)
            raise

    def _seed(self, number: int) -> None:
        number = spread(number)
        seed_everything(number)
        if self._own is None:
            self._own = own_generators(self.inner, self._beside)
        for generator in self._own:
            seed_generator(generator, number)


class WorkerStart:
    """The user's `worker_init_fn`, which must find the user's dataset in `get_worker_info()`, not our wrapper."""

    def __init__(self, start: Callable[[int], object] | None, *, is_saved: bool) -> None:
        """`is_saved`: the training answers signals with a checkpoint."""
        self._start, self._is_saved = start, is_saved

    def __call__(self, worker: int) -> None:
        """In a new worker, before its first item."""
        if self._is_saved and os.getpgrp() != os.getpid():
            # Not forked from the training (`multiprocessing_context="spawn"`), or it would have left already.
            leave_group(end_with_parent=False)
        information = get_worker_info()
        if information is not None and isinstance(information.dataset, SeededDataset):
            # It refuses a plain assignment.
            object.__setattr__(information, "dataset", information.dataset.inner)
        if self._start is not None:
            try:
                self._start(worker)
            except BaseException as error:
                leave_out_ours(error)
                raise


def draw_in_every_pass() -> None:
    """Have a pass of workers that stay draw a number as well; once per process.

    Every pass draws one from the training's generator, to seed workers; but where they stay (`persistent_workers=True`)
    only the first of a process does. A resumed training's first evaluation is a later one of the training that was
    never killed: without this, whatever is drawn after it, by dropout first of all, is not the same.
    """
    iterator = worker_iterators()
    original = getattr(iterator, WORKERS_BEGIN, None)
    if original is None or getattr(original, "draws", False):
        return

    @functools.wraps(original)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # the first has drawn when it was made
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        original(self, loader, first_iter)

    reset.draws = True  # type: ignore[attr-defined]
    setattr(iterator, WORKERS_BEGIN, reset)
