"""What `run.batches(loader)` returns: the loader's batches, with a safe point before each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from buoy.flight.last_words import leave_out_ours


class Batches:
    """Iterates over a loader from where the run is. Each `iter()` is a new pass.

    >>> batches = Batches([1, 2], iter)
    >>> len(batches), next(batches), list(batches)
    (2, 1, [1, 2])
    """

    def __init__(self, loader: Iterable[Any], walk: Callable[[Any], Iterator[Any]]) -> None:
        self.loader = loader
        """The user's own loader."""
        self._walk = walk
        self._current: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self._walk(self.loader)

    def __next__(self) -> Any:
        if self._current is None:
            self._current = iter(self)
        try:
            return next(self._current)
        except BaseException as error:
            leave_out_ours(error)
            raise
