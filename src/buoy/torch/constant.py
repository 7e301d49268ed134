"""Python's and numpy's generators made to give the same number again and again, by the state of their Mersenne twister.

Its next 624 words are read from the state as they stand, so a state of equal words gives equal numbers: floats,
integers and normals alike, whichever way they were imported.
"""

from __future__ import annotations

import random
import sys
from typing import Any

_WORDS = 624
SHARES = (0.2, 0.9, 0.53)
"""Of their range. Draws of integers and normals refuse some numbers and take the next: with 0.53 nearly none."""


class Generators:
    """Both generators of this process; the caller puts their own states back."""

    def __init__(self) -> None:
        self.share = SHARES[0]
        self.drew = False
        """One of them was used."""
        self.ran_out = False
        """More was drawn than is constant: whole and parts had other numbers."""

    def set(self) -> None:
        """To their constant state."""
        self._word = _before_tempering(int(self.share * (1 << 12)) << 20)  # low bits 0, for integers
        random.setstate((3, (self._word,) * _WORDS + (0,), None))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            key = numpy.full(_WORDS, self._word, dtype="uint32")
            try:
                numpy.random.set_state(("MT19937", key, 0, 0, 0.0))
            except (ValueError, TypeError):  # another generator was put in its place
                return

    def look(self) -> None:
        """Whether they were used since."""
        states = [random.getstate()[1]]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            kept = numpy.random.get_state(legacy=False)
            if kept["bit_generator"] == "MT19937":
                states.append((int(kept["state"]["key"][0]), int(kept["state"]["pos"])))
        for first, *_, position in states:
            self.drew = self.drew or position != 0
            self.ran_out = self.ran_out or first != self._word


def _before_tempering(word: int) -> int:
    """The word of the state that is read as this one.

    >>> state = random.getstate()
    >>> random.setstate((3, (_before_tempering(0x33300000),) * 624 + (0,), None))
    >>> random.getrandbits(32) == 0x33300000
    True
    >>> random.setstate(state)
    """
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(5):
        found = word ^ ((found << 7) & 0x9D2C5680)
    word = found
    for _ in range(3):
        found = word ^ (found >> 11)
    return found & 0xFFFFFFFF
