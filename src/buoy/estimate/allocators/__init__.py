"""Models of the allocators that stand between a training and its memory: pure replays of events.

Every module has `replay(events, capacity=None) -> Replay`. With a capacity, "fits" is the allocator's own answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from buoy.estimate.trace import Event


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request the allocator could not serve."""

    event: int
    """Index of the event that failed."""
    requested: int
    """Bytes the training asked for."""
    needed: int
    """Bytes the allocator asked the device for."""
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What an allocator model says about a trace."""

    peak_allocated: int
    """Most bytes in blocks handed out (`torch.cuda.max_memory_allocated`)."""
    peak_reserved: int
    """Most bytes taken from the device (`torch.cuda.max_memory_reserved`)."""
    end_allocated: int
    peak_event: int
    """Index of the event at which allocated was highest."""
    retries: int = 0
    """How often cached blocks had to be given back to the device to go on."""
    failure: OutOfMemory | None = None

    @property
    def fits(self) -> bool:
        """Whether every request was served."""
        return self.failure is None


class Allocator(Protocol):
    """What `buoy.estimate` needs of an allocator module."""

    def replay(self, events: Sequence[Event], capacity: int | None = None) -> Replay:
        """Replay the events, within a capacity or without end."""

    def floor(self, events: Sequence[Event]) -> int:
        """Bytes below which no capacity can serve these events."""


class Fits:
    """Answers "does it fit in so many bytes" for one trace, replaying only where the two bounds leave it open.

    Whether a trace fits is not monotone in the capacity (giving cached blocks back rearranges what follows), so
    nothing between the bounds is interpolated.
    """

    def __init__(
        self, events: Sequence[Event], allocator: Allocator, unlimited: Replay | None = None
    ) -> None:
        self._events = events
        self._allocator = allocator
        self.unlimited = unlimited or allocator.replay(events)
        self.floor = allocator.floor(events)

    def within(self, capacity: int) -> bool:
        """Whether the trace runs to its end within this capacity."""
        if capacity < self.floor:
            return False
        if capacity >= self.unlimited.peak_reserved:
            return True
        return self._allocator.replay(self._events, capacity).fits
