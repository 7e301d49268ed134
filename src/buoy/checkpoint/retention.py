"""Which checkpoints stay: the last few, the best, one every few hours, and what was pinned. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Protocol, TypeVar

from buoy.errors import UsageError
from buoy.units import parse_duration

SAFE = 2
"""So many good checkpoints stay when room is made before a write."""


class Kept(Protocol):
    """What retention needs to know of a checkpoint; `store.Entry` is one, and so is a copy in a mirror."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def time(self) -> float | None: ...  # noqa: D102
    @property
    def bytes(self) -> int: ...  # noqa: D102
    @property
    def about(self) -> dict[str, object]: ...  # noqa: D102
    @property
    def complete(self) -> bool: ...  # noqa: D102


Entry = TypeVar("Entry", bound=Kept)


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
                "cannot keep so few checkpoints",
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
                "cannot keep one every no time",
                received=f"every={self.every!r}",
                expected="a time, more than 0",
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
    for entry in sorted(entries, key=_age):
        value = metrics_of(entry).get(name)
        if not entry.complete or not isinstance(value, int | float) or isnan(value):
            continue
        if chosen is None or (value > best if more else value < best):
            chosen, best = entry, float(value)
    return chosen


def metrics_of(entry: Kept) -> dict[str, object]:
    """The figures that were reported for it, by name."""
    metrics = entry.about.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def last_finite(entries: Iterable[Entry], *, now: bool = False) -> Entry | None:
    """The last one made while the loss was finite, where the newest was made when it no longer was, or `now` is.

    One of which nobody could tell stands in only where none is known to be finite.
    """
    good = sorted((entry for entry in entries if entry.complete), key=_age)
    told = [entry for entry in good if entry.about.get("finite") is not None]
    if not now and not (told and told[-1].about["finite"] is False):
        return None
    finite = [entry for entry in good if entry.about.get("finite")]
    unknown = [entry for entry in good if entry.about.get("finite") is None]
    return next((each[-1] for each in (finite, unknown) if each), None)


def surplus(entries: Sequence[Entry], keep: Keep) -> list[Entry]:
    """What need not stay, oldest first. Never the newest, a pinned one, or one that is not complete."""
    good = sorted((entry for entry in entries if entry.complete), key=_age)
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
    good = sorted((entry for entry in entries if entry.complete), key=_age)
    best = best_of(good, keep)
    order = [*surplus(entries, keep), *_history(good, keep), *good]
    order = [*(entry for entry in order if entry is not best), *([best] if best else [])]
    finite = last_finite(good)
    stays = [*good[-safe:], *_pinned(good), *([finite] if finite is not None else [])]
    # Of the damaged those whose size is known: the others may free nothing, and would be lost for that.
    damaged = [
        entry for entry in entries if not entry.complete and entry.bytes and not entry.about.get("pin")
    ]
    chosen = sorted(damaged, key=_age) if len(good) >= safe else []
    for entry in order:
        if not any(entry is other for other in (*stays, *chosen)):
            chosen.append(entry)
    return chosen


def _age(entry: Kept) -> tuple[int, float]:
    return entry.step, entry.time or 0.0


def _pinned(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.about.get("pin")]


def _history(good: Sequence[Entry], keep: Keep) -> list[Entry]:
    """The first of each period, counted from the epoch so that what once stayed goes on to stay."""
    if keep.every is None:
        return []
    first: dict[int, Entry] = {}
    for entry in good:
        first.setdefault(int((entry.time or 0.0) // keep.seconds), entry)
    return list(first.values())
