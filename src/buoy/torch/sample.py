"""A batch as a loader would make it, without taking one from it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from buoy.errors import UsageError
from buoy.torch import rng


def is_source(value: object) -> bool:
    """Whether batches come from this.

    >>> is_source(DataLoader([1, 2, 3]))
    True
    """
    return isinstance(value, DataLoader)


def batch_of(loader: Any, name: str = "loader") -> Any:
    """The first samples of the data set as one batch: no iterator, no worker, and no random number is used up.

    >>> batch_of(DataLoader([1, 2, 3], batch_size=2))
    tensor([1, 2])
    """
    data, size = loader.dataset, loader.batch_size
    if isinstance(data, IterableDataset) or size is None or not hasattr(data, "__len__"):
        raise UsageError(
            f"a batch cannot be made without taking one from `{name}`",
            received="a loader with an iterable data set or a batch sampler of its own",
            expected="a sample batch",
            hint=f"`batch = next(iter({name}))`, then `%buoy plan` again",
        )
    places = list(range(min(size, len(data))))
    before = rng.capture()
    try:
        many = getattr(data, "__getitems__", None)
        return loader.collate_fn(many(places) if many is not None else [data[place] for place in places])
    finally:
        rng.restore(before)
