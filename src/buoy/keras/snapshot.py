"""Copies to go back to when there may be too little memory for the optimizer's own update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Snapshot:
    """The values of some variables, in host memory: on an accelerator that is the memory that is not short."""

    def __init__(self, variables: Iterable[Any]) -> None:
        unique = {id(variable): variable for variable in variables}
        self._copies = [(variable, variable.numpy()) for variable in unique.values()]

    def restore(self) -> None:
        """Put every value back."""
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
