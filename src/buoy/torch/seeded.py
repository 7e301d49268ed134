"""The user's dataset, with its randomness made a function of the place in the epoch; runs inside the data workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from ctypes import c_uint64
from multiprocessing.sharedctypes import RawValue
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from buoy.flight.last_words import leave_out_ours
from buoy.machine.priority import leave_group
from buoy.torch.own_generators import own_generators
from buoy.torch.rng import draw_from, global_generators, mix, seed_everything, seed_generator

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


class SeededPasses(IterableDataset[Any]):
    """An iterable dataset in workers that outlive a pass: what they draw in it must not depend on the passes before.

    Each generator is seeded, as a pass begins, from the pass and from what that generator would have drawn first in
    its worker: workers that were started alike, to share out one shuffled list, go on alike, the others do not.
    """

    def __init__(self, dataset: Any) -> None:
        self.inner = dataset
        self._number = RawValue(c_uint64)  # shared: the workers run already when a later pass begins
        self._generators: list[tuple[Any, int]] | None = None

    def begin(self, number: int) -> None:
        """In the training's process, before an iteration: which pass it is."""
        self._number.value = number

    def __iter__(self) -> Iterator[Any]:
        if self._generators is None:
            found = [*global_generators(), *own_generators(self.inner)]
            self._generators = [(generator, draw_from(generator)) for generator in found]
        number = self._number.value
        for generator, first in self._generators:
            seed_generator(generator, mix(number, first))
        return iter(self.inner)


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
        if information is not None and isinstance(information.dataset, (SeededDataset, SeededPasses)):
            # It refuses a plain assignment.
            object.__setattr__(information, "dataset", information.dataset.inner)
        if self._start is not None:
            try:
                self._start(worker)
            except BaseException as error:
                leave_out_ours(error)
                raise
