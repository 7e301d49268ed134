"""Large things that this Python process holds: what the collector knows, and what hangs on that."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

Size = Callable[[Any], tuple[int, int] | None]
"""(address, bytes) of a thing that takes memory of its own; None for any other."""

_NAMES = {"Tensor", "Variable", "ndarray", "DataFrame", "Series"}
"""Classes of interest, or their bases: a process has half a million objects, and each question takes its time."""
_AT_ONCE = 1000


def by_owner(owners: dict[str, Iterable[Any]], size_of: Size, kinds: dict[str, Size]) -> dict[str, int]:
    """Bytes by owner, largest first; each block is counted once, for the first owner that has it.

    `owners` are asked first, with `size_of`; then an old traceback and a notebook's outputs; then whatever else is in
    the process, by `kinds`.
    """
    seen: set[int] = set()
    found: dict[str, int] = {}

    def add(owner: str, things: Iterable[Any], measure: Size) -> None:
        for thing in things:
            try:
                block = measure(thing)
            except Exception:  # noqa: BLE001 - odd objects (fake, sparse, half-built) are of no interest here
                continue
            if block is not None and block[0] and block[1] and block[0] not in seen:
                seen.add(block[0])
                found[owner] = found.get(owner, 0) + block[1]

    def any_kind(thing: Any) -> tuple[int, int] | None:
        return next((block for block in (measure(thing) for measure in kinds.values()) if block), None)

    for owner, things in owners.items():
        add(owner, things, size_of)
    add("sys.last_traceback", _last_traceback(), any_kind)
    add("notebook Out[]", _outputs(), any_kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asking a deprecated object for its class is enough to be warned
        everything = _everything()
        for kind, measure in kinds.items():
            add(kind, everything, measure)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def array(thing: Any) -> tuple[int, int] | None:
    """A NumPy array that owns its memory."""
    if type(thing).__name__ not in ("ndarray", "memmap") or thing.base is not None:
        return None
    return thing.ctypes.data, int(thing.nbytes)


def data_frame(thing: Any) -> tuple[int, int] | None:
    """A pandas data frame or series, without the strings in it."""
    if type(thing).__name__ not in ("DataFrame", "Series") or not hasattr(thing, "memory_usage"):
        return None
    used = thing.memory_usage(deep=False)
    return id(thing), int(used.sum() if hasattr(used, "sum") else used)


def _everything() -> list[Any]:
    """The collector tracks containers only: an array is known by what it is in."""
    tracked = gc.get_objects()
    wanted: dict[type, bool] = {}
    found = {}
    for first in range(0, len(tracked), _AT_ONCE):
        some = tracked[first : first + _AT_ONCE]
        for thing in (*some, *gc.get_referents(*some)):
            kind = type(thing)
            if kind not in wanted:
                wanted[kind] = any(base.__name__ in _NAMES for base in kind.__mro__)
            if wanted[kind]:
                found[id(thing)] = thing
    return list(found.values())


def _last_traceback() -> list[Any]:
    traceback = getattr(sys, "last_traceback", None)
    values: list[Any] = []
    while traceback is not None:
        values += traceback.tb_frame.f_locals.values()
        traceback = traceback.tb_next
    return values


def _outputs() -> list[Any]:
    outputs = getattr(sys.modules.get("__main__"), "Out", None)
    return list(outputs.values()) if isinstance(outputs, dict) else []
