"""Which checkpoints stay: the last few, the best, one every few hours, and what was pinned.

How many fit: what the user allows or what is free, less a reserve, predicted before training. `DiskBudget` keeps a
run to both: it removes what need not stay, and makes room for the next one. Everything else here is a pure function.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isnan
from typing import TYPE_CHECKING

from buoy.errors import UsageError
from buoy.machine import disk
from buoy.units import format_bytes, parse_duration

if TYPE_CHECKING:
    from buoy.checkpoint.store import Entry, Store

SAFE = 2
"""So many good checkpoints stay when room is made before a write."""
_PATIENCE = 10.0
"""Seconds for a removal; where it takes longer, saving would not go well either."""
_GROWN = 1.1
"""A checkpoint that is so many times the planned size is planned for again."""
_SHORT_SECONDS = 1800.0
"""So long after room was short for them fewer are kept; then as many as the disk says it has room for."""
_PAGES = 16 << 10
"""Disks count in pages: two checkpoints of the same state differ by less than this."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints a run keeps: the `last` few, the `best` by a metric, one `every` so many hours.

    >>> Keep(last=3, best="val_loss", every="6h")
    Keep(last=3, best='val_loss', every='6h')
    >>> Keep(best="max:accuracy").metric
    ('accuracy', True)

    Pinned checkpoints (`run.save(pin="before the new data")`) and the newest one always stay; where the loss is no
    longer finite, the last one from before that stays too.
    """

    last: int = 3
    best: str | None = None
    """`"val_loss"` (the lowest), `"min:val_loss"` or `"max:accuracy"`."""
    every: str | None = None
    """`"6h"`: the first one of each six hours stays."""

    def __post_init__(self) -> None:
        if not isinstance(self.last, int) or isinstance(self.last, bool) or self.last < 1:
            raise UsageError(
                "too few checkpoints to keep",
                received=f"last={self.last!r}",
                expected="a number of at least 1",
                hint="`buoy.Keep(last=3)`",
            )
        if self.best is not None and not self.metric[0]:
            raise UsageError(
                "cannot read which metric is best",
                received=f"best={self.best!r}",
                expected="the name of a metric",
                hint='`best="val_loss"` or `best="max:accuracy"`',
            )
        if self.every is not None and not self.seconds > 0:
            raise UsageError(
                "the time between kept checkpoints must be more than 0",
                received=f"every={self.every!r}",
                expected="a time greater than 0",
                hint='`every="6h"`',
            )

    @property
    def metric(self) -> tuple[str, bool]:
        """The metric's name, and whether more of it is better."""
        direction, colon, name = (self.best or "").partition(":")
        if colon and direction in ("min", "max"):
            return name, direction == "max"
        return self.best or "", False

    @property
    def seconds(self) -> float:
        """The hours of `every`, in seconds."""
        return parse_duration(str(self.every)) if self.every is not None else 0.0


def as_keep(keep: Keep | int | None) -> Keep:
    """The user's `keep=`: a number is `Keep(last=number)`."""
    if keep is None:
        return Keep()
    return keep if isinstance(keep, Keep) else Keep(last=keep)


def best_of(entries: Iterable[Entry], keep: Keep) -> Entry | None:
    """The best complete one by the metric asked for; the earlier of two equals. None when none has the metric."""
    if keep.best is None:
        return None
    name, more = keep.metric
    chosen: Entry | None = None
    best = 0.0
    for entry in sorted(entries, key=age):
        value = metrics_of(entry).get(name)
        if not entry.complete or not isinstance(value, int | float) or isnan(value):
            continue
        if chosen is None or (value > best if more else value < best):
            chosen, best = entry, float(value)
    return chosen


def metrics_of(entry: Entry) -> dict[str, object]:
    """The figures that were reported for it, by name."""
    metrics = entry.about.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def last_finite(entries: Iterable[Entry], *, now: bool = False) -> Entry | None:
    """The last one made while the loss was finite, where the newest was made when it no longer was, or `now` is.

    One of which nobody could tell stands in only where none is known to be finite.
    """
    good = sorted((entry for entry in entries if entry.complete), key=age)
    told = [entry for entry in good if entry.about.get("finite") is not None]
    if not now and not (told and told[-1].about["finite"] is False):
        return None
    finite = [entry for entry in good if entry.about.get("finite")]
    unknown = [entry for entry in good if entry.about.get("finite") is None]
    return next((each[-1] for each in (finite, unknown) if each), None)


def surplus(entries: Sequence[Entry], keep: Keep) -> list[Entry]:
    """What need not stay, oldest first. Never the newest, a pinned one, or one that is not complete."""
    good = sorted((entry for entry in entries if entry.complete), key=age)
    newest_of_step = list({entry.step: entry for entry in good}.values())
    stays = [*newest_of_step[-keep.last :], *_pinned(good), *_history(good, keep)]
    finite = last_finite(good)
    if finite is not None:
        stays.append(finite)
    best = best_of(good, keep)
    if best is not None:
        stays.append(best)
    return [entry for entry in good if not any(entry is other for other in stays)]


def to_make_room(entries: Sequence[Entry], keep: Keep, bytes_needed: int, safe: int = SAFE) -> list[Entry]:
    """What to remove before a write that needs so many bytes more, at least `safe` good ones staying.

    Empty when even all of these would not do: then removing them would lose something and gain nothing.
    """
    chosen: list[Entry] = []
    freed = 0
    for entry in to_give_up(entries, keep, safe):
        if freed >= bytes_needed:
            break
        chosen.append(entry)
        freed += entry.bytes
    return chosen if freed >= bytes_needed else []


def to_give_up(entries: Sequence[Entry], keep: Keep, safe: int = SAFE) -> list[Entry]:
    """All that may go while `safe` good ones stay, in the order of sacrifice.

    First what is damaged, then what is surplus, the history of `every`, older ones of the last few, the best one.
    """
    good = sorted((entry for entry in entries if entry.complete), key=age)
    best = best_of(good, keep)
    order = [*surplus(entries, keep), *_history(good, keep), *good]
    order = [*(entry for entry in order if entry is not best), *([best] if best else [])]
    finite = last_finite(good)
    stays = [*good[-safe:], *_pinned(good), *([finite] if finite is not None else [])]
    # Of the damaged those whose size is known: the others may free nothing, and would be lost for that.
    damaged = [
        entry for entry in entries if not entry.complete and entry.bytes and not entry.about.get("pin")
    ]
    chosen = sorted(damaged, key=age) if len(good) >= safe else []
    for entry in order:
        if not any(entry is other for other in (*stays, *chosen)):
            chosen.append(entry)
    return chosen


def age(entry: Entry) -> tuple[int, float]:
    """The newest is the greatest."""
    return entry.step, entry.time or 0.0


def _pinned(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.about.get("pin")]


def _history(good: Sequence[Entry], keep: Keep) -> list[Entry]:
    """The first of each period, counted from the epoch so that what once stayed still stays."""
    if keep.every is None:
        return []
    first: dict[int, Entry] = {}
    for entry in good:
        first.setdefault(int((entry.time or 0.0) // keep.seconds), entry)
    return list(first.values())


_RESERVE_SHARE = 0.05
_RESERVE_MOST = 2 << 30
"""Left free for everything else: the flight log, the user's own files."""
_BLOCKS = 1 << 20
_FEW_FILES = 8
PASSING = 2
"""So often a disk is taken at its word that it has room, when a write finds none; then for one with a quota."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that checkpoints may take in all, those that are there included."""

    total: int | None
    """None: nothing tells."""
    source: str
    """`disk="20GB"` or `free here`."""

    def left(self, used: int) -> int | None:
        """Bytes for further checkpoints beside those that take `used`."""
        return None if self.total is None else max(0, self.total - used)


def room(folder: str, allowed: int | None, used: int) -> Room:
    """What checkpoints may take in this folder, where they take `used` already."""
    space = disk.space(_existing(folder))
    if space is None:
        return Room(allowed, "given")
    reserve = min(_RESERVE_MOST, int(space.total * _RESERVE_SHARE))
    here = used + max(0, space.free - reserve)
    if allowed is not None and allowed <= here:
        return Room(allowed, "given")
    return Room(here, "free")


def free(folder: str) -> int | None:
    """Bytes free for new files here, without any reserve."""
    space = disk.space(_existing(folder))
    return None if space is None else space.free


def reported_room(folder: str, size: int) -> int | None:
    """Bytes free here where these are enough for a file of this size, which a write found no room for.

    So it was a quota that nobody sees, or an error that passes, as a network drive's.
    """
    left = disk.files_left(_existing(folder))
    if left is not None and left < _FEW_FILES:
        return None
    found = free(folder)
    return found if found is not None and is_enough(found, size) else None


def is_enough(free: int, size: int) -> bool:
    """Whether a file of this size fits into so many bytes, with what its file system needs beside it."""
    return free >= size + size // 50 + _BLOCKS


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be kept, given the room, and how to say it."""

    keep: Keep
    fits: int | None
    """So many checkpoints fit at once; None when it is not known."""
    words: str


def plan(size: int, here: Room, keep: Keep, hours: float | None, finite: bool = False) -> Plan:
    """Fit the wish to keep checkpoints of `size` bytes to the room; `hours` is what the session has left.

    One more than is kept must fit, since the old one goes only when the new one is proven. `finite`: the last one from
    before the loss was lost stays beside all others.
    """
    each = format_bytes(size)
    if here.total is None or size <= 0:
        return Plan(
            keep, None, f"checkpoints of {each}, keeping {said(keep)}; the room on this disk is not known"
        )
    fits = here.total // size
    wanted = keep.last + (keep.best is not None) + finite + _in_history(keep, hours)
    whole = format_bytes(here.total) + (" free" if here.source == "free" else "")
    if fits >= wanted + 1:
        return Plan(
            keep,
            fits,
            f"checkpoints of {each}, keeping {said(keep)}: {format_bytes(size * wanted)} of {whole}",
        )
    if fits == 0:
        return Plan(keep, 0, f"a checkpoint of {each} does not fit in {whole}")
    if fits == 1:
        words = f"only one checkpoint of {each} fits in {whole}: it is kept, and buoy cannot save another"
        return Plan(replace(keep, last=1, best=None, every=None), 1, words)
    # The best one is worth more than a third of the last few; two slots are needed for the newest and the next.
    with_best = keep.best is not None and fits >= 3 + finite
    last = max(1, min(keep.last, fits - 1 - with_best - finite))
    smaller = replace(keep, last=last, best=keep.best if with_best else None, every=None)
    if keep.every is not None and fits > last + with_best + finite + 1:
        smaller = replace(smaller, every=keep.every)  # the history gives way first when the room runs out
    words = f"{wanted} checkpoints of {each} do not fit in {whole}: keeping {said(smaller)}"
    return Plan(smaller, fits, words)


def _in_history(keep: Keep, hours: float | None) -> int:
    return ceil(hours * 3600 / keep.seconds) if keep.every is not None and hours is not None else 0


def said(keep: Keep) -> str:
    """`the last 3 and the best`."""
    parts = [f"the last {keep.last}" if keep.last > 1 else "the last one"]
    if keep.best is not None:
        parts.append("the best")
    if keep.every is not None:
        parts.append(f"one every {keep.every}")
    return " and ".join(parts) if len(parts) < 3 else f"{parts[0]}, {parts[1]} and {parts[2]}"


def _existing(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    folder = os.path.abspath(folder)
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


class DiskBudget:
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

    def plan(self, size: int, hours: float | None) -> Plan:
        """What can be kept of checkpoints of this size, before the first is made; kept to from now on."""
        entries = self._store.list()
        used = sum(entry.bytes for entry in entries)
        self._has_finite = last_finite(entries) is not None
        here = room(self._store.folder, self._allowed, used)
        found = plan(size, here, self._wish, hours, self._has_finite)
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
            return f"there is room again: keeping {said(found.keep)}"
        each, expected = format_bytes(size), format_bytes(planned)
        grown = f"checkpoints are {each}" + (f", not {expected}" if each != expected else "")
        finite = " and the last finite one" if has_finite else ""
        return f"{grown}: keeping {said(found.keep)}{finite}"

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
        on_disk = free(self._store.folder)
        # A checkpoint is worth more than the reserve, but not more than the user's own budget.
        bounds = [] if on_disk is None else [on_disk]
        if self._allowed is not None:
            bounds.append(max(0, self._allowed - used))
        left = min(bounds, default=size)
        short = size - left - (_PAGES if left == on_disk else 0)
        if short <= 0 or self._go_down_to_one(entries, short):
            return None
        most = left + sum(entry.bytes for entry in to_give_up(entries, self._keep, safe=1))
        is_given = self._allowed is not None and left != on_disk
        given = "" if self._allowed is None else f" of {format_bytes(self._allowed)}"
        stays = " beside the last good one" if any(entry.complete for entry in entries) else ""
        return (
            f"{format_bytes(size)} do not fit{stays}: at most {format_bytes(most)}{given} can be made available, "
            f"{format_bytes(size - most)} more are needed"
            + (", which `disk=` does not allow" if is_given else "")
        )

    def give_way(self, size: int, *, is_sure: bool) -> bool:
        """A write of so many bytes found the disk full: make room for it, if that is what was missing.

        `is_sure`: it is full, or a quota is, whatever the disk itself reports; else nothing is removed where it reports
        room enough.
        """
        self.settle()
        if not is_sure and reported_room(self._store.folder, size) is not None:
            return False
        entries = self._store.list()
        # A quota is not seen: nothing seems to be missing, and one after the other is tried.
        missing = max(1, size - _PAGES - (free(self._store.folder) or 0))
        return self._remove(to_make_room(entries, self._keep, missing)) or self._go_down_to_one(
            entries, missing
        )

    def room_in_words(self, size: int) -> str:
        """To be added to words that there is none: what the disk itself reports, where that is enough."""
        reported = reported_room(self._store.folder, size)
        return f", though the disk reports {format_bytes(reported)} free" if reported is not None else ""

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
        from buoy.checkpoint.store import restore_command

        stays = last_finite(self._store.list(), now=True)
        kept = (
            f"step {stays.step}, the last one before that, is kept until it is finite again (to go back to it: "
            f"`{restore_command(self._store.folder, stays.step)}`, and train in that folder)"
            if stays is not None
            else "there is none from before that"
        )
        self._event("not-finite", step=step, kept=stays.step if stays is not None else None)
        return f"the loss or a weight is not a finite number at step {step}; checkpoints are still saved, and {kept}"

    def newest_step(self) -> int | None:
        """The step of the newest that looks whole; None when there is none or it is not known."""
        try:
            return next((entry.step for entry in self._store.list() if entry.complete), None)
        except Exception:  # noqa: BLE001 - only words depend on it
            return None

    def _room(self) -> tuple[list[Entry], int, int | None]:
        entries = self._store.list()
        used = sum(entry.bytes for entry in entries)
        return entries, used, room(self._store.folder, self._allowed, used).left(used)

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
            f"there is no longer room for {SAFE + 1} checkpoints: step "
            f"{', '.join(str(entry.step) for entry in going)} removed, step {good[0].step} is good and stays; "
            f"keeping {said(self._keep)} until there is room again",
        )
        return True

    def _reads_well(self, entry: Entry) -> bool:
        from buoy.checkpoint.manifest import DamagedCheckpoint

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


class BestMetric:
    """The name in `Keep(best=...)`, compared with the names that are reported.

    A training may report several, one after the other, so that one without that name means little. An epoch that
    ended without it, or another name that comes around again, does.
    """

    def __init__(self, keep: Keep | int | None, say: Callable[[str], None]) -> None:
        self._say = say
        self._awaited = keep.metric[0] if isinstance(keep, Keep) and keep.best else None
        self._others: set[str] = set()

    def came(self, names: Iterable[str], *, in_batch: bool = False) -> None:
        """These were reported; `in_batch`: with every batch perhaps, so that they come around before any epoch ends."""
        names = set(names)
        if self._awaited is None:
            return
        if self._awaited in names:
            self._awaited = None
        elif self._others & names and not in_batch:
            self._tell()
        elif not in_batch:
            self._others |= names

    def epoch_ends(self) -> None:
        """What an epoch reports has been reported."""
        if self._awaited is not None and self._others:
            self._tell()

    def _tell(self) -> None:
        self._say(
            f"no metric is named {self._awaited!r} (`Keep(best=...)`): reported so far are "
            f"{', '.join(sorted(self._others))}; until it is reported, no best checkpoint is kept"
        )
        self._awaited = None
