"""Whether this process only rehearses a training for `buoy plan`: then nothing of a run is recorded or saved."""

from __future__ import annotations

import os
import tempfile

VARIABLE = "BUOY_TRACING"
"""Set in every process that runs a person's code for a plan; the stage puts the folder that is removed after it."""


def is_rehearsal() -> bool:
    """Whether the training is only run up to its first step."""
    return bool(os.environ.get(VARIABLE))


def scratch_folder() -> str:
    """A folder in place of the run's own."""
    given = os.environ.get(VARIABLE, "")
    return tempfile.mkdtemp(prefix="buoy-rehearsal-", dir=given if os.path.isdir(given) else None)
