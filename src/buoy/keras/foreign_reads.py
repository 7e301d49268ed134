"""Who else reads a shuffled pipeline while it is trained on: every iterator of it draws seeds of its shuffles."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from buoy.keras.pipeline_reading import nodes_of

_watched: list[tuple[Sequence[Any], Callable[[], bool]]] = []
_own = threading.local()


@contextmanager
def ours() -> Iterator[None]:
    """Iterators made within it are counted elsewhere."""
    before = getattr(_own, "depth", 0)
    _own.depth = before + 1
    try:
        yield
    finally:
        _own.depth = before


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


def _teach() -> None:
    """Let datasets ask us when they are iterated; once per process, and of no effect while nothing is watched."""
    original = tf.data.Dataset.__iter__
    if getattr(original, "_knows_buoy", False):
        return

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        if _watched and not getattr(_own, "depth", 0) and tf.executing_eagerly():
            read = {id(node) for node in nodes_of(self)}
            for entry in list(_watched):
                if any(id(shuffle) in read for shuffle in entry[0]) and entry[1]():
                    _watched.remove(entry)
        return original(self)

    iterate._knows_buoy = True  # type: ignore[attr-defined]
    tf.data.Dataset.__iter__ = iterate
