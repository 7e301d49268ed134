"""What a step would write, held back until the whole step is known to succeed; and copies to go back to when there may
be too little memory for the optimizer's own update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from buoy._compat.keras import raw


class Snapshot:
    """The values of some variables, in host memory: on an accelerator that is the memory that is not short."""

    def __init__(self, variables: Iterable[Any]) -> None:
        unique = {id(variable): variable for variable in variables}
        self._copies = [(variable, variable.numpy()) for variable in unique.values()]

    def restore(self) -> None:
        """Restore every value."""
        for variable, value in self._copies:
            variable.assign(value)


def variables_of(model: Any) -> list[Any]:
    """Everything that a training step of this model may write."""
    optimizer = model.optimizer
    return [
        *model.variables,
        *model.metrics_variables,
        *(optimizer.variables if optimizer is not None else []),
    ]


class Deferred(keras.StatelessScope):  # type: ignore[misc]
    """Inside it every assignment to a Keras variable is noted instead of made; readers see the noted value.

    BatchNorm statistics, seeds and metrics move only when the step commits, so a step that fails before that has
    nothing to restore.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(list(values), collect_losses=True, initialize_variables=False)
        self.written: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Note an assignment."""
        variable, _ = update
        self.written[id(variable)] = variable
        super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        """The noted value; else the variable's own, which Keras's regularizers expect here."""
        noted = self.state_mapping.get(id(variable))
        return raw(variable) if noted is None else noted

    def updates(self) -> list[tuple[Any, Any]]:
        """Each variable that was assigned to, with the last value given."""
        return [(variable, self.state_mapping[key]) for key, variable in self.written.items()]
