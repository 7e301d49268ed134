"""The kernels that recorded into this folder before. Scripts may record there too: a notebook speaks of none."""

from __future__ import annotations

import os
from typing import NamedTuple

from buoy.flight.attempt import attempt_numbers, is_kernel
from buoy.machine.records import read_json
from buoy.verdict.evidence import load
from buoy.verdict.values import number as number_of


class Life(NamedTuple):
    """One kernel, or one IPython in a terminal, from its first recorded cell on. Times are of the wall clock."""

    number: int
    """Its attempt in the folder."""
    began: float
    ended: float | None
    """None: it lives."""


def lives(folder: str) -> list[Life]:
    """All kernels that recorded here, the one that asks included, by their numbers."""
    found = []
    for number in attempt_numbers(folder):
        attempt = os.path.join(folder, "attempts", f"{number:04d}")
        about = read_json(os.path.join(attempt, "attempt.json")) or {}
        if is_session(about.get("command")):
            began = number_of(about.get("wall")) or 0.0
            found.append(Life(number, began, _ended(attempt, began)))
    return found


def _ended(attempt: str, began: float) -> float | None:
    death = read_json(os.path.join(attempt, "death.json")) or {}
    wall = number_of(death.get("wall"))
    if wall is not None:  # all that is read of most: a folder may hold hundreds
        return wall
    evidence = load(attempt)
    if not evidence.is_dead:
        return None
    return evidence.last_wall if evidence.last_wall is not None else began


def unseen(known: list[Life]) -> list[Life]:
    """Those that ended since the last kernel began here, the latest end first: that one told of all ends before it."""
    ended = [
        (life.ended, life)
        for life in known
        if life.ended is not None
        and not any(other.number > life.number and other.began >= life.ended for other in known)
    ]
    return [life for _, life in sorted(ended, reverse=True)]


def last_ended(known: list[Life]) -> Life | None:
    """The kernel that ended last; None when none did."""
    return max(
        (life for life in known if life.ended is not None), key=lambda life: life.ended or 0.0, default=None
    )


def is_session(command: object) -> bool:
    """Whether cells are typed into a recorded command: a notebook's kernel, or IPython in a terminal.

    >>> is_session(["python", "/usr/bin/ipython3"]), is_session(["python", "train.py"])
    (True, False)
    """
    words = command[:2] if isinstance(command, list) else []
    return is_kernel(command) or any(
        os.path.basename(str(word).removesuffix("/__main__.py")).lower().startswith("ipython")
        for word in words
    )
