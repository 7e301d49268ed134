"""The checkpoints on disk and the room they have: what the next one needs, and what need not stay."""

from __future__ import annotations

import threading
from collections.abc import Callable

from buoy.checkpoint import budget
from buoy.checkpoint.retention import Keep, surplus, to_make_room
from buoy.checkpoint.store import Entry, Store
from buoy.units import format_bytes

_PATIENCE = 10.0
"""Seconds for a removal; where it takes longer, saving would not go well either."""


class Shelf:
    """Keeps a run's checkpoints within a wish and a budget."""

    def __init__(
        self,
        store: Store,
        wish: Keep,
        allowed: int | None,
        trouble: Callable[[str, str], object],
        event: Callable[..., object],
    ) -> None:
        """`allowed`: bytes for all checkpoints together, as the user gave them."""
        self._event = event
        self._store = store
        self._keep = self._wish = wish
        self._allowed = allowed
        self._trouble = trouble
        self._tidying: threading.Thread | None = None

    def plan(self, size: int, hours: float | None) -> budget.Plan:
        """What can be kept of checkpoints of this size, before the first is made; kept to from now on."""
        used = sum(entry.bytes for entry in self._store.list())
        found = budget.plan(size, budget.room(self._store.folder, self._allowed, used), self._wish, hours)
        self._keep = found.keep
        if found.keep != self._wish:
            self._event("retention", text=found.words)
        return found

    def make_room(self, size: int) -> str | None:
        """Free what a checkpoint of this size needs, if two good ones remain; why not, when it cannot fit."""
        self.settle()  # what is being removed is no longer listed, but still takes its bytes
        entries, used, left = self._room()
        if left is None or left >= size:
            return None
        going = to_make_room(entries, self._keep, size - left)
        for entry in going:
            self._store.remove(entry)
        if going:
            steps = ", ".join(str(entry.step) for entry in going)
            self._event("retention", text=f"room made for the next checkpoint: removed step {steps}")
        if going or self._physically_fits(size, used):
            return None
        return f"{format_bytes(size)} do not fit: {format_bytes(left)} of the budget are left"

    def tidy(self) -> None:
        """Apply retention, beside the training: deleting gigabytes takes a while on some disks."""
        if self._tidying is not None and self._tidying.is_alive():
            return
        self._tidying = threading.Thread(target=self._remove_surplus, name="buoy-retention", daemon=True)
        self._tidying.start()

    def settle(self) -> None:
        """Wait for what is being removed."""
        if self._tidying is not None:
            self._tidying.join(_PATIENCE)

    def newest_step(self) -> int | None:
        """The step of the newest that looks whole; None when there is none or it cannot be told."""
        try:
            return next((entry.step for entry in self._store.list() if entry.complete), None)
        except Exception:  # noqa: BLE001 - only words depend on it
            return None

    def _room(self) -> tuple[list[Entry], int, int | None]:
        entries = self._store.list()
        used = sum(entry.bytes for entry in entries)
        return entries, used, budget.room(self._store.folder, self._allowed, used).left(used)

    def _physically_fits(self, size: int, used: int) -> bool:
        """A checkpoint is worth more than the reserve, but not more than the user's own budget."""
        if self._allowed is not None and used + size > self._allowed:
            return False
        free = budget.free(self._store.folder)
        return free is None or free > size

    def _remove_surplus(self) -> None:
        try:
            for entry in surplus(self._store.list(), self._keep):
                self._store.remove(entry)
        except Exception as error:  # noqa: BLE001 - more is kept than need be; nothing is lost
            self._trouble("retention", f"an old checkpoint could not be removed: {error}")
