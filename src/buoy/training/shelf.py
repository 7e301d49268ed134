"""The checkpoints on disk and the room they have: what the next one needs, and what need not stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from buoy.checkpoint import budget
from buoy.checkpoint.going_back import restore_command
from buoy.checkpoint.retention import SAFE, Keep, last_finite, surplus, to_give_up, to_make_room
from buoy.checkpoint.store import DamagedCheckpoint, Entry, Store
from buoy.units import format_bytes

_PATIENCE = 10.0
"""Seconds for a removal; where it takes longer, saving would not go well either."""
_GROWN = 1.1
"""A checkpoint that is so many times the planned size is planned for anew."""
_SHORT_SECONDS = 1800.0
"""So long after room was short for them fewer are kept; then as many as the disk says it has room for."""
_PAGES = 16 << 10
"""Disks count in pages: two checkpoints of the same state differ by less than this."""


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
        self._planned = 0
        self._has_finite = False
        """The last one from before the loss was lost is there, and stays beside what is planned."""
        self._is_predicted = True
        self._was_short: float | None = None
        """When it was last found that there is no room for what is planned; fewer are kept since."""

    def plan(self, size: int, hours: float | None) -> budget.Plan:
        """What can be kept of checkpoints of this size, before the first is made; kept to from now on."""
        entries = self._store.list()
        used = sum(entry.bytes for entry in entries)
        self._has_finite = last_finite(entries) is not None
        room = budget.room(self._store.folder, self._allowed, used)
        found = budget.plan(size, room, self._wish, hours, self._has_finite)
        self._keep, self._planned = found.keep, size
        if found.keep != self._wish:
            self._event("retention", text=found.words)
        return found

    def learn(self, size: int, hours: float | None) -> str | None:
        """A checkpoint took so much: plan again where that, or what stays beside it, is new; what changes, in words."""
        before, planned = self._keep, self._planned
        has_finite = last_finite(self._store.list()) is not None
        is_over = self._was_short is not None and time.monotonic() - self._was_short >= _SHORT_SECONDS
        is_new = self._is_predicted or size > _GROWN * planned or has_finite != self._has_finite
        if not planned or not (is_new or is_over):
            return None
        self._is_predicted = False
        found = self.plan(size, hours)
        if found.keep == before:
            return None
        self._was_short = None
        if is_over:
            return f"there is room again: keeping {budget.said(found.keep)}"
        each, expected = format_bytes(size), format_bytes(planned)
        grown = f"checkpoints are {each}" + (f", not {expected}" if each != expected else "")
        finite = " beside the last finite one" if has_finite else ""
        return f"{grown}: keeping {budget.said(found.keep)}{finite}"

    def make_room(self, size: int) -> str | None:
        """Free what a checkpoint of this size needs, before it is written; why not, when it cannot fit.

        Two good ones stay while that is possible. Where no third fits any more, the newest one stays, once every
        byte of it was read: the older of two is worth less than all that is still to come.
        """
        self.settle()  # what is being removed is no longer listed, but still takes its bytes
        entries, used, left = self._room()
        if left is None or left >= size:
            return None
        if self._remove(to_make_room(entries, self._keep, size - left)):
            return None
        free = budget.free(self._store.folder)
        # A checkpoint is worth more than the reserve, but not more than the user's own budget.
        bounds = [] if free is None else [free]
        if self._allowed is not None:
            bounds.append(max(0, self._allowed - used))
        left = min(bounds, default=size)
        short = size - left - (_PAGES if left == free else 0)
        if short <= 0 or self._go_down_to_one(entries, short):
            return None
        most = left + sum(entry.bytes for entry in to_give_up(entries, self._keep, safe=1))
        is_given = self._allowed is not None and left != free
        given = "" if self._allowed is None else f" of {format_bytes(self._allowed)}"
        stays = " beside the last good one" if any(entry.complete for entry in entries) else ""
        return (
            f"{format_bytes(size)} do not fit{stays}, for which {format_bytes(most)}{given} can be had: "
            f"{format_bytes(size - most)} more are needed"
            + (", which `disk=` does not allow" if is_given else "")
        )

    def give_way(self, size: int, *, is_sure: bool) -> bool:
        """A write of so many bytes found the disk full: make room for it, if that is what was missing.

        `is_sure`: it is full, or a quota is, whatever the disk itself reports; else nothing is removed where it reports
        room enough.
        """
        self.settle()
        if not is_sure and budget.reported_room(self._store.folder, size) is not None:
            return False
        entries = self._store.list()
        # A quota is not seen: nothing seems to be missing, and one after the other is tried.
        missing = max(1, size - _PAGES - (budget.free(self._store.folder) or 0))
        return self._remove(to_make_room(entries, self._keep, missing)) or self._go_down_to_one(
            entries, missing
        )

    def room_in_words(self, size: int) -> str:
        """To be added to words that there is none: what the disk itself reports, where that is enough."""
        free = budget.reported_room(self._store.folder, size)
        return f", though the disk reports {format_bytes(free)} free" if free is not None else ""

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

    def lost(self, step: int) -> str:
        """The loss, or a weight, is no finite number any more: what that means for what is kept, in words."""
        stays = last_finite(self._store.list(), now=True)
        kept = (
            f"step {stays.step}, the last one made before that, is kept until it is finite again (to go back to it: "
            f"`{restore_command(self._store.folder, stays.step)}`, and train there)"
            if stays is not None
            else "none was made before that"
        )
        self._event("not-finite", step=step, kept=stays.step if stays is not None else None)
        return f"the loss or a weight is not a finite number at step {step}; checkpoints are made as ever, and {kept}"

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

    def _go_down_to_one(self, entries: list[Entry], missing: int) -> bool:
        going = to_make_room(entries, self._keep, missing, safe=1)
        good = [entry for entry in entries if entry.complete]
        if not going or not self._reads_well(good[0]):
            return False
        self._remove(going)
        lost = [entry for entry in going if entry.complete]
        if not lost:
            return True  # only damaged ones went: as many good ones are kept as ever
        stay = [entry for entry in good if entry not in lost]
        beside = (self._keep.best is not None) + sum(bool(entry.about.get("pin")) for entry in stay[1:])
        last = max(1, min(self._keep.last, len(stay) - beside))
        self._keep = replace(self._keep, last=last, every=None)
        self._was_short = time.monotonic()
        self._trouble(
            "room",
            f"there is no room for {SAFE + 1} checkpoints any more: step "
            f"{', '.join(str(entry.step) for entry in going)} removed, step {good[0].step} is good and stays; "
            f"keeping {budget.said(self._keep)} until there is room again",
        )
        return True

    def _reads_well(self, entry: Entry) -> bool:
        try:
            self._store.open(entry)
        except DamagedCheckpoint:
            return False
        return True

    def _remove(self, going: list[Entry]) -> bool:
        for entry in going:
            self._store.remove(entry)
        if going:
            steps = ", ".join(str(entry.step) for entry in going)
            self._event("retention", text=f"room made for the next checkpoint: removed step {steps}")
        return bool(going)

    def _remove_surplus(self) -> None:
        try:
            for entry in surplus(self._store.list(), self._keep):
                self._store.remove(entry)
        except Exception as error:  # noqa: BLE001 - more is kept than need be; nothing is lost
            self._trouble("retention", f"an old checkpoint could not be removed: {error}")
