"""How much data a loader has: told when a pass goes on over another amount than it was begun with."""

from __future__ import annotations

from typing import Any


def extent_of(loader: Any) -> dict[str, int]:
    """The samples of its dataset, those of a pass where they are others, and the batch size; what can be known.

    >>> extent_of([1, 2, 3])
    {'batches': 3}
    """
    if not hasattr(loader, "dataset"):
        length = _length(loader)
        return {} if length is None else {"batches": length}
    size = getattr(loader, "batch_size", None)
    drawn = _length(getattr(loader, "sampler", None))
    samples = _length(loader.dataset)
    found = {"samples": samples, "drawn": drawn if drawn != samples else None, "batch_size": size}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def changed(then: dict[str, int] | None, now: dict[str, int]) -> str | None:
    """What to say where a pass goes on over other data; None when all that is known of both is the same.

    >>> changed({"samples": 100, "batch_size": 10}, {"samples": 120, "batch_size": 10})  # doctest: +ELLIPSIS
    'this resume is not bit for bit: the checkpoint was made with 100 samples, now there are 120: ...'
    """
    then = then or {}
    words, other_data = [], False
    for name, unit in (("samples", "samples"), ("drawn", "samples in a pass"), ("batches", "batches")):
        if name in then and name in now and then[name] != now[name]:
            words.append(f"with {then[name]} {unit}, now there are {now[name]}")
            other_data = True
    if "batch_size" in then and "batch_size" in now and then["batch_size"] != now["batch_size"]:
        words.append(f"in batches of {then['batch_size']}, now they are of {now['batch_size']}")
    if not words:
        return None
    what = (
        "in the rest of this epoch some may come twice and some not at all; use the same data"
        if other_data
        else "the rest of this epoch is cut into other batches; use the same batch size"
    )
    return f"this resume is not bit for bit: the checkpoint was made {'; '.join(words)}: {what}"


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None
