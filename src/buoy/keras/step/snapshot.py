"""Copies to go back to when there may be too little memory for the optimizer's own update.

What a step would write, held back until the whole step is known to succeed.

Variables that the forward pass writes and that are neither weights, metrics, seeds nor BatchNorm statistics.

A teacher that follows the weights, or a counter of steps, moves once per step: every micro-batch finds it as it was
before the step, and writes the same. A counter of samples moves with every micro-batch. The probe tells which.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from buoy._compat.keras import layers_of, raw
from buoy.microbatch.errors import CannotSplit


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


class Deferred(keras.StatelessScope):  # type: ignore[misc]
    """Inside it every assignment to a Keras variable is noted instead of made; readers see the noted value.

    BatchNorm statistics, seeds and metrics move only when the step commits, so a step that fails before that has
    nothing to put back.
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


class States:
    """How each of them is treated, for one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._carried: set[int] = set()

    def among(self, written: Iterable[Any]) -> list[Any]:
        """Those of the written variables."""
        model = self._model
        known = {id(variable) for variable in model.metrics_variables}
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                known |= {id(variable) for variable in layer.non_trainable_variables}
        return [each for each in written if id(each) not in known and not _is_seed(each)]

    def restarted(self, written: Iterable[Any]) -> frozenset[int]:
        """Those that every micro-batch finds as they were before the step, by id."""
        return frozenset(id(variable) for variable in self.among(written)) - self._carried

    def learn(self, otherwise: list[Any]) -> bool:
        """These end otherwise in parts; whether that is new, and they are from now on carried from part to part."""
        ours = {id(variable) for variable in self._model.variables}
        new = {id(variable) for variable in otherwise} - self._carried
        self._carried |= new
        # A metric of the person's own, updated inside the loss, cannot be told from another single number.
        stuck = [v for v in otherwise if id(v) not in new and (v.shape or id(v) in ours)]
        if stuck:
            raise CannotSplit(
                "a variable that the forward pass writes ends otherwise in micro-batches than on the whole batch",
                received=stuck[0].path,
                expected="one that moves once per step whatever the samples, or adds up over them",
                hint="write it in a callback (`on_train_batch_end`) or after the step; or ask for a smaller batch",
            )
        return bool(new)


def _is_seed(variable: Any) -> bool:
    return str(variable.path).endswith("seed_generator_state")
