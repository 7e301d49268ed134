# ruff: noqa: N818 - these read as the sentence that they are: `except CannotSplit`
"""What can be wrong with a step, in words.

BuoyError
 +-- StepError            base of these: the state is as before the step, unless it is a TornStep
      +-- BadBatch        the batch has no samples, or its parts disagree
      +-- BadLoss         the loss function gave something that is no loss, or did more than compute one
      +-- CannotSplit     this model and loss cannot be computed in pieces with the same result
      +-- OutOfMemory     nothing is left to split
      +-- PeerFailed      another process of the group could not do its part
      +-- TornStep        an optimizer failed half-way without a copy to go back to
"""

from __future__ import annotations

from buoy.errors import BuoyError


class StepError(BuoyError):
    """A training step that was not done; the state is as before it."""


class BadBatch(StepError):
    """The batch is empty, or its parts have different numbers of samples."""


class BadLoss(StepError):
    """The loss is not a number to minimise, or computing it changed what it must not change."""


class CannotSplit(StepError):
    """Micro-batches would not give the full batch's gradient for this model and loss."""


class OutOfMemory(StepError):
    """The smallest possible piece of the step does not fit."""


class PeerFailed(StepError):
    """Another rank failed in this step, so this one did not do it either."""


class TornStep(StepError):
    """The optimizer's step failed after it had changed something: go back to the last checkpoint."""
