"""Who else reads a shuffled pipeline while it is trained on: every iterator of it draws seeds of its shuffles."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from buoy.keras.pipeline_reading import is_cache, is_reshuffling, nodes_of

_watched: list[tuple[Sequence[Any], Callable[[], bool]]] = []
_listening: list[_Again] = []
_own = threading.local()


def ours() -> AbstractContextManager[None]:
    """Iterators made within it are counted elsewhere."""
    return _within("depth")


def by_data() -> AbstractContextManager[None]:
    """Iterators made within it are no reading by a callback: data that is trained or validated on makes them."""
    return _within("data")


@contextmanager
def _within(what: str) -> Iterator[None]:
    before = getattr(_own, what, 0)
    setattr(_own, what, before + 1)
    try:
        yield
    finally:
        setattr(_own, what, before)


@contextmanager
def watch(shuffles: Sequence[Any], tell: Callable[[], bool]) -> Iterator[None]:
    """Within it, call `tell` when somebody else makes an iterator through one of these shuffles, until it says True."""
    _teach()
    entry = (shuffles, tell)
    _watched.append(entry)
    try:
        yield
    finally:
        if entry in _watched:
            _watched.remove(entry)


class _Again:
    """Hears of shuffled pipelines beside the training that are gone through twice: the order is each time another."""

    def __init__(self, trained: Iterable[Any], step: Callable[[], int], say: Callable[[str], None]) -> None:
        self._trained = {id(node) for node in trained}
        self._step, self._say = step, say
        self._read: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Each shuffle, and at which step it was gone through first: one `evaluate` does it twice."""
        self._is_told = False

    def reads(self, nodes: list[Any]) -> None:
        """A pipeline of these nodes is gone through."""
        if self._is_told or getattr(_own, "data", False):
            return
        # What was cached keeps its order, and a new process shuffles it as the first time.
        cached = {id(above) for node in nodes if is_cache(node) for above in nodes_of(node)}
        shuffles = [node for node in nodes if is_reshuffling(node) and id(node) not in cached]
        if any(id(node) in self._trained for node in shuffles):
            return
        now = self._step()
        if any(self._read.setdefault(node, now) != now for node in shuffles):
            self._is_told = True
            self._say(
                "a callback goes through a shuffled dataset of its own: after a resume that comes in another order, "
                "the training does not; hint: `reshuffle_each_iteration=False`, or make it anew each time"
            )


@contextmanager
def tell_of_own_sets(dataset: Any, step: Callable[[], int], say: Callable[[str], None]) -> Iterator[None]:
    """Within it, say so once when a callback reads such a set of its own; `dataset` is the one that is trained on."""
    _teach()
    again = _Again(nodes_of(dataset) if hasattr(dataset, "_inputs") else [], step, say)
    _listening.append(again)
    try:
        yield
    finally:
        _listening.remove(again)


def _teach() -> None:
    """Let datasets ask us when they are iterated; once per process, and of no effect while nothing is watched."""
    original = tf.data.Dataset.__iter__
    if getattr(original, "_knows_buoy", False):
        return

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        if (_watched or _listening) and not getattr(_own, "depth", 0) and tf.executing_eagerly():
            nodes = list(nodes_of(self))
            read = {id(node) for node in nodes}
            for again in _listening:
                again.reads(nodes)
            for entry in list(_watched):
                if any(id(shuffle) in read for shuffle in entry[0]) and entry[1]():
                    _watched.remove(entry)
        return original(self)

    iterate._knows_buoy = True  # type: ignore[attr-defined]
    tf.data.Dataset.__iter__ = iterate
