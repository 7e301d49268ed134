"""How many samples fit, found by computing a few of them and measuring: never by trial and death.

What a step needs is the largest of several lines over its samples (activations; the gradients of one layer), so it
bends upwards: bytes per sample at a small size, times any larger size, is never too little. That bound says where
it is safe to measure next. The line through the last sizes is trusted for a short way only: another one may begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Measure = Callable[[int], int | None]
"""Bytes that so many samples needed; None when they did not fit."""

_MARGIN = 0.98  # of the predicted maximum
_STRAIGHT = 0.05  # change of slope, relative, within which the last sizes are on one line
_TRUSTED = 1.25  # growth over which a straight line is trusted; then it is measured again
_WORTH = 1.1  # growth below which another measurement tells nothing new


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured."""

    samples: int
    """That fit at once; never less than what was just computed."""
    slope: float
    """Bytes per sample."""
    besides: float
    bound: bool
    """Nothing but an upper bound was needed, and all samples fit."""


def climb(measure: Measure, start: int, most: int, room: Callable[[], float]) -> Reading:
    """Measure growing sizes from `start` on, until it is known whether `most` samples fit into the room there is.

    That is asked for each time: what a measurement leaves behind in the allocator's gaps is gone.

    >>> climb(lambda n: 1000 + 10 * n, start=4, most=64, room=lambda: 100_000)
    Reading(samples=64, slope=260.0, besides=0.0, bound=True)
    >>> climb(lambda n: 1000 + 10 * n, start=4, most=640, room=lambda: 3000).samples
    196
    """
    points: list[tuple[int, float]] = []
    slopes: list[float] = []
    size = min(start, most)
    while True:
        needed = measure(size)
        if needed is None:
            return _before(points, size)
        points.append((size, max(1.0, needed)))
        free = room()
        each = points[-1][1] / size
        if each * most <= free:
            return Reading(most, each, 0.0, bound=True)
        if len(points) > 1:
            (small, low), (large, high) = points[-2:]
            slopes.append((high - low) / (large - small))
        safe = max(1, int(free * _MARGIN / each))
        end = _end(points, slopes, free)
        further = safe if end is None else max(safe, min(end, int(size * _TRUSTED)))
        larger = min(2 * size, further, most)
        if larger < size * _WORTH:
            largest = max(size, larger)
            return (
                Reading(largest, each, 0.0, bound=False)
                if end is None
                else _on_the_line(points, slopes, largest)
            )
        size = larger


def _end(points: list[tuple[int, float]], slopes: list[float], free: float) -> int | None:
    """Samples up to the end of the line; None while it is not straight."""
    if len(slopes) < 2 or slopes[-1] <= 0 or abs(slopes[-1] - slopes[-2]) > _STRAIGHT * slopes[-1]:
        return None
    size, needed = points[-1]
    return int((free - needed + slopes[-1] * size) / slopes[-1] * _MARGIN)


def _on_the_line(points: list[tuple[int, float]], slopes: list[float], samples: int) -> Reading:
    size, needed = points[-1]
    return Reading(samples, slopes[-1], max(0.0, needed - slopes[-1] * size), bound=False)


def _before(points: list[tuple[int, float]], size: int) -> Reading:
    """The last size that fitted."""
    if not points:
        return Reading(max(1, size // 2), 0.0, 0.0, bound=False)
    last, needed = points[-1]
    return Reading(last, needed / last, 0.0, bound=False)
