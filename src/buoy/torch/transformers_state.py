"""What a Hugging Face trainer holds beside model and optimizer: its state, callbacks, and the loss not yet logged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch

from buoy.checkpoint.store import StoredTensor
from buoy.torch.tensors import kept

_OF_THIS_RUN = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
                "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
                "stateful_callbacks")  # fmt: skip
"""Fields that the arguments of this start decide."""
_COUNTERS = ("_globalstep_last_logged", "current_flos")


class TrainerState:
    """A `Tracked`."""

    weight = 0

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def tensor(self) -> Callable[[StoredTensor], Any]:
        """Kept: these are few."""
        return kept

    def state(self) -> object:
        """Plain values."""
        trainer = self._trainer
        counters = {name: getattr(trainer, name) for name in _COUNTERS if hasattr(trainer, name)}
        waiting = getattr(trainer, "_tr_loss", None)
        return {
            "state": plain(trainer.state),
            "callbacks": [(type(each).__name__, each.state()["attributes"]) for each in self._exportable()],
            "counters": counters,
            "loss": float(waiting) if isinstance(waiting, torch.Tensor) else None,
        }

    def mismatches(self, state: Any) -> list[str]:
        """Callbacks may come and go."""
        return []

    def load(self, state: Any) -> None:
        """In place: the trainer has handed these objects out."""
        trainer = self._trainer
        for name, value in state["state"].items():
            if name not in _OF_THIS_RUN and hasattr(trainer.state, name):
                setattr(trainer.state, name, value)
        saved = list(state["callbacks"])
        for callback in self._exportable():
            own = next((entry for entry in saved if entry[0] == type(callback).__name__), None)
            if own is not None:
                saved.remove(own)
                for name, value in own[1].items():
                    setattr(callback, name, value)
        for name, value in state["counters"].items():
            setattr(trainer, name, value)
        waiting = getattr(trainer, "_tr_loss", None)
        if isinstance(waiting, torch.Tensor) and state["loss"] is not None:
            waiting.fill_(state["loss"])
            trainer._total_loss_scalar = -state[
                "loss"
            ]  # `train_loss` is of the steps of this call of `train`

    def _exportable(self) -> list[Any]:
        """Callbacks with a state of their own, and the trainer's control flags."""
        trainer = self._trainer
        everybody = [*trainer.callback_handler.callbacks, trainer.control]
        return [each for each in everybody if callable(getattr(each, "state", None))]


def plain(state: Any) -> dict[str, Any]:
    """A `TrainerState` as its own `save_to_json` writes it."""
    whole = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return json.loads(json.dumps(whole, default=_number))  # type: ignore[no-any-return]


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else None
