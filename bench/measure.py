"""How we measure on shared, noisy machines: interleaved, many times, as ratios with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def interval(values: Sequence[float], level: float = 0.95, draws: int = 4000) -> tuple[float, float, float]:
    """Median, and a bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    tail = (1 - level) / 2
    return statistics.median(values), medians[int(tail * draws)], medians[int((1 - tail) * draws) - 1]


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text."""
    cells = [[str(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
