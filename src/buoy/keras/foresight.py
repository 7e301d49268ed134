"""What a batch that cannot be computed in parts will need, from computing a few of its samples.

Its peak at a few samples is measured; how it grows is not, since that is told exactly by the shapes in the graph: in
proportion to the samples, or with their square where each is compared with each. Only a small part is computed, since
TensorFlow's pool never gives back what a rehearsal took, and larger arrays do not fit into the gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

PART = 32
"""The part of the whole batch's need that is computed to measure it."""


class Growth:
    """Bytes over samples: a parabola through what all results of the step take for the whole, a half and a quarter.

    What does not grow, the gradients, is left out: a few samples have made it before anything is measured.

    >>> Growth(lambda n: 10 * n, 64).times(2)
    32.0
    >>> pairs = Growth(lambda n: 7 * n * n, 64)
    >>> pairs.times(16), pairs.part(16)
    (16.0, 16)
    >>> weights = Growth(lambda n: 1000 + n, 64)
    >>> weights.part(32), weights.times(2)
    (2, 32.0)
    """

    def __init__(self, results: Callable[[int], int], rows: int) -> None:
        half, quarter = rows // 2, rows // 4
        whole = results(rows)
        self._rows, self._line, self._square = rows, whole / rows, 0.0
        if quarter:
            middle = results(half)
            upper = (whole - middle) / (rows - half)
            lower = (middle - results(quarter)) / (half - quarter)
            self._square = max(0.0, (upper - lower) / (rows - quarter))
            self._line = max(0.0, upper - self._square * (rows + half))

    def times(self, samples: int) -> float:
        """How often the need of so many samples is in that of all."""
        return self._at(self._rows) / max(1.0, self._at(samples))

    def part(self, share: int) -> int:
        """The samples that need this share of what all need."""
        wanted = self._at(self._rows) / share
        root = sqrt(self._line**2 + 4 * self._square * wanted)
        return max(1, round(2 * wanted / (root + self._line))) if wanted else 1

    def _at(self, samples: int) -> float:
        return self._line * samples + self._square * samples * samples
