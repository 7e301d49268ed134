"""A second start of a run that is being trained: it is refused, and must not hide the training that lives."""

from __future__ import annotations

from buoy.flight.attempt import Attempt, discard
from buoy.flight.log import read_events

REFUSED = "refused"
"""The event by which a process says that another one trains the run it asked for."""
_WORK = ("opened", "training", "save", "loop")


def is_refused(attempt: Attempt) -> bool:
    """Whether all that this attempt did was to ask for a run that another process trains."""
    kinds = {event.get("kind") for event in read_events(attempt.folder)}
    return REFUSED in kinds and not kinds.intersection(_WORK)


def forget(attempt: Attempt) -> bool:
    """Remove the attempt, as of a process that was refused without `buoy run` none is made; whether it is gone."""
    try:
        discard(attempt)
    except OSError:
        return False  # the recorder still writes: then it is one attempt more
    return True
