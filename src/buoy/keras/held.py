"""The runs that this process has brought to their end itself: a further `fit` goes on from what is in memory.

Only a new process, or another model or optimizer than the one that was trained, needs the checkpoint. Loading it over
a live training would take back whatever the script has drawn or changed between two calls of `fit`.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from buoy.keras import rng
from buoy.machine import cell


@dataclass(frozen=True, slots=True)
class Ended:
    """The last `fit` of this process on a run folder."""

    token: str | None
    """Stands in each checkpoint that the fit made: a newest one with another token was made by somebody else."""
    trained: bool
    """False: the run was finished already, and its end was loaded."""
    rng: dict[str, Any]
    """The generators at that end: the script draws from them before the next `fit`."""
    cell: int | None
    model: weakref.ref[Any]
    optimizer: weakref.ref[Any] | None

    def is_in(self, model: Any) -> bool:
        """Whether this model, with its optimizer, is the one that has the state of that end."""
        optimizer = self.optimizer() if self.optimizer is not None else None
        is_model: bool = self.model() is model
        return is_model and model.optimizer is optimizer

    @property
    def is_of_this_script(self) -> bool:
        """Trained since the script, or the notebook's cell, began: what follows is no second start of it."""
        return self.trained and self.cell == cell.running()


_ended: dict[str, Ended] = {}
os.register_at_fork(after_in_child=_ended.clear)  # the parent may go on with the run


def new_token() -> str:
    """Not from the generators of the training."""
    return os.urandom(8).hex()


def ended(folder: str) -> Ended | None:
    """What this process knows of the run in this folder."""
    return _ended.get(folder)


def begins(folder: str) -> None:
    """A training that does not come to its end is resumed from its checkpoint."""
    _ended.pop(folder, None)


def ends(folder: str, model: Any, token: str | None, *, trained: bool) -> None:
    """The model holds the end of the run now."""
    optimizer = weakref.ref(model.optimizer) if model.optimizer is not None else None
    _ended[folder] = Ended(token, trained, rng.capture(), cell.running(), weakref.ref(model), optimizer)
