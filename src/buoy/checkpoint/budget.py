"""How many checkpoints fit: what the user allows or what is free, less a reserve, predicted before training."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import ceil

from buoy.checkpoint.retention import Keep
from buoy.machine import disk
from buoy.units import format_bytes

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
        words = f"only one checkpoint of {each} fits in {whole}: it is kept, and no further one can be saved"
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
