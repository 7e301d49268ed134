"""The session's end, seen coming: a checkpoint before it, then more of them, until the platform pulls the plug."""

from __future__ import annotations

import time
from dataclasses import dataclass

from buoy.checkpoint.schedule import Cost
from buoy.flight.attempt import Attempt
from buoy.machine.records import read_json

_LEAST_MARGIN = 30.0
_LEAST_PAUSE = 10.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the session ends, on the monotonic clock."""

    at: float
    limit: float
    """Seconds the session may live in all."""

    def left(self, now: float) -> float:
        """Seconds to go; negative when the session outlived its limit."""
        return self.at - now

    def due(self, now: float, saved: float | None, cost: Cost | None, mirror: float, step: float) -> bool:
        """Whether to save now, having last saved at `saved`.

        `mirror` is how long the second home is behind, `step` what a step takes: both are part of the margin.
        """
        begins = self.at - margin(cost, mirror, step)
        if not begins <= now < self.at:
            return False
        return saved is None or saved < begins or now - saved >= pause(cost)


def margin(cost: Cost | None, mirror: float, step: float) -> float:
    """Seconds before the end from which it is time to save.

    >>> margin(Cost(0.1, 0.1, 4.0), mirror=10.0, step=0.5)
    48.3
    """
    save = cost.stall + cost.write if cost is not None else 0.0
    return max(_LEAST_MARGIN, 15.0 + 3 * save + 2 * mirror + 2 * step)


def pause(cost: Cost | None) -> float:
    """Seconds between the checkpoints before the end: more work is saved than is spent on saving it."""
    return max(_LEAST_PAUSE, 10 * cost.seconds, 3 * cost.write) if cost is not None else _LEAST_PAUSE


def find(attempt: Attempt | None, given: float | None) -> Deadline | None:
    """The session's end: as given, counted from the attempt's start, or what the attempt knows of its platform."""
    known = (read_json(f"{attempt.folder}/attempt.json") if attempt is not None else None) or {}
    limit, began = known.get("time_limit"), known.get("session_started")
    if given is not None:
        # On a platform the session began with its machine; a limit that a person gives begins with the run.
        limit, began = given, began if known.get("time_limit_source") == "given" else known.get("wall")
    if not isinstance(limit, int | float):
        return None
    lived = max(0.0, time.time() - began) if isinstance(began, int | float) else 0.0
    return Deadline(time.monotonic() + limit - lived, float(limit))
