"""The checkpoints that cannot be used, named on the way to one that can: a few by a line each, the rest by number."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

DAMAGED, HALF, NEWER = "damaged", "not whole", "of a newer buoy"
_MOST_LINES = 3
_MOST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Unusable:
    """A checkpoint, here or in the second home, that cannot be gone on from."""

    step: int
    name: str
    """Its folder: the whole path here, the name alone in the second home."""
    what: str
    """The file, and what is wrong with it."""
    fault: str = DAMAGED

    @property
    def was_whole(self) -> bool:
        """Whether it was a checkpoint once; else its copying, or its removal, was not finished."""
        return self.fault != HALF


class PassedOver:
    """What one search had to pass over."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._untold: list[Unusable] = []
        self.all: list[Unusable] = []

    def note(self, unusable: Unusable, words: str) -> None:
        """Name one, once; a person at a screen needs the newest few."""
        if unusable in self.all:
            return
        self.all.append(unusable)
        if len(self.all) <= _MOST_LINES:
            self._say(words)
        else:
            self._untold.append(unusable)

    def close(self) -> None:
        """Count what was not named."""
        for place, steps in _by_place(self._untold).items():
            shown = ", ".join(map(str, steps[:_MOST_STEPS])) + (", ..." if len(steps) > _MOST_STEPS else "")
            more = f"{len(steps)} more checkpoint{'' if len(steps) == 1 else 's'}"
            self._say(f"and {more} that cannot be used {place}: step{'' if len(steps) == 1 else 's'} {shown}")
        self._untold = []


def _by_place(unusable: list[Unusable]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for one in unusable:
        folder = os.path.dirname(one.name)
        places.setdefault(f"in {folder}" if folder else "in the mirror", []).append(one.step)
    return places


def in_words(unusable: list[Unusable]) -> str:
    """All of them in one line: `step 40: state.safetensors: 512 of 4096 bytes are there; and 2 more`."""
    words = [f"step {one.step}: {one.what}" for one in unusable[:_MOST_LINES]]
    if len(unusable) > _MOST_LINES:
        words.append(f"and {len(unusable) - _MOST_LINES} more")
    return "; ".join(words)
