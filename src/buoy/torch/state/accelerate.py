"""What Hugging Face's accelerate has prepared: known by its classes, never imported.

Its optimizer or scheduler is a shell around the user's own, which is what is tracked. Its loader does work that must
stay (devices, and knowing the last batch of a pass, at which gradients are synchronized) around a `DataLoader`, which
can be opened at any batch. It reads one batch ahead of the one that it hands out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buoy.torch.data.loader import Pass

_SHELLS = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}


def unwrapped(value: Any) -> Any:
    """The user's own optimizer or scheduler; anything else as it is."""
    kind = type(value)
    if not kind.__module__.startswith("accelerate."):
        return value
    return getattr(value, _SHELLS[kind.__name__]) if kind.__name__ in _SHELLS else value


def is_prepared(loader: Any) -> bool:
    """Whether this is a loader of accelerate's that reads for itself; a dispatcher's process 0 reads for others too."""
    kind = type(loader)
    return kind.__module__ == "accelerate.data_loader" and kind.__name__ == "DataLoaderShard"


def within(loader: Any) -> Any:
    """The `DataLoader` that a prepared one reads; any other loader as it is."""
    return loader.base_dataloader if is_prepared(loader) else loader


class PreparedPass:
    """A pass over a prepared loader: its own iteration, over a pass of ours."""

    extent: dict[str, int]

    def __init__(self, loader: Any, inner: Pass) -> None:
        self._loader, self._inner = loader, inner
        self.extent = inner.extent
        self.samples, self.batches = inner.samples, inner.batches
        self._place = inner.state_dict()
        """Of the last batch that was handed out."""
        self._ahead: deque[dict[str, Any]] = deque()
        """The places of those that were read since."""
        self._iterator = iter(loader)

    def __next__(self) -> Any:
        base = self._loader.base_dataloader
        self._loader.base_dataloader = _Reading(base, self._read)
        try:
            batch = next(self._iterator)
        finally:
            self._loader.base_dataloader = base
        self._place = self._ahead.popleft()
        self.samples, self.batches = int(self._place["samples"]), int(self._place["batches"])
        return batch

    def _read(self) -> Iterator[Any]:
        while True:
            try:
                batch = next(self._inner)
            except StopIteration:
                return
            self._ahead.append(self._inner.state_dict())
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place of the last batch that was handed out."""
        return self._place


class _Reading:
    """Stands for the loader within, but for the batches that come from it."""

    def __init__(self, loader: Any, read: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._read = loader, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._read()
