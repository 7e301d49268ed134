"""What the loaders of a run keep from one pass to the next: the state of their samplers and generators."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from buoy.training.position import Loop

if TYPE_CHECKING:
    from buoy.torch.data import Feeds


class Loaders:
    """The loaders of a run, known by the first loop of an epoch that goes over them.

    A loop that is under way has the state of its loader in its place. These are the others: the next epoch begins
    with them, and a loop that was done is not begun again.
    """

    def __init__(self, feeds: Feeds, saved: dict[str, Any] | None) -> None:
        self._feeds = feeds
        self._saved: dict[str, Any] = dict(saved or {})
        """Of loaders that have not been seen in this process yet."""
        self._seen: dict[str, weakref.ref[Any]] = {}

    def begin(self, loop: Loop, loader: Any, tracked: Collection[object]) -> None:
        """A loop begins; its loader gets back what it had, unless the place of the loop has it."""
        name = str(loop.root)
        saved = self._saved.pop(name, None)
        if saved is not None and not loop.saved:
            self._feeds.put_between_passes(loader, saved, {id(each) for each in tracked})
        try:
            self._seen[name] = weakref.ref(loader)
        except TypeError:  # a list of batches
            self._seen.pop(name, None)

    def state(self, under_way: Collection[int]) -> dict[str, Any]:
        """For the checkpoint; `under_way`: the loaders (by id) whose places have it."""
        states = dict(self._saved)
        for name, known in self._seen.items():
            loader = known()
            if loader is not None and id(loader) not in under_way:
                state = self._feeds.between_passes(loader)
                if state is not None:
                    states[name] = state
        return states
