"""What a Hugging Face trainer holds beside model and optimizer: its state, callbacks, and the loss not yet logged."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from buoy.checkpoint.store import StoredTensor
from buoy.checkpoint.values import Container
from buoy.torch.rng import generator_state, set_generator_state
from buoy.torch.tensors import kept

_OF_THIS_RUN = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
                "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
                "stateful_callbacks")  # fmt: skip
"""Fields that the arguments of this start decide."""
_COUNTERS = ("_globalstep_last_logged", "current_flos")
_MANY = 1 << 16  # entries in what a trainer keeps of its own
_DEEP = 4  # containers in containers there


class TrainerState:
    """A `Tracked`."""

    weight = 0

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        library = _names_of_library(type(trainer))
        self._own = {
            name: copy.deepcopy(value)
            for name, value in vars(trainer).items()
            if name not in library and _is_plain(value)
        }
        """Numbers and lists of a subclass (TRL counts tokens, and collects what it will log), as `train` began."""

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
            "own": self._changed(),
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
        exported = list(state["callbacks"])
        for callback in self._exportable():
            theirs = next((entry for entry in exported if entry[0] == type(callback).__name__), None)
            if theirs is not None:
                exported.remove(theirs)
                for name, value in theirs[1].items():
                    setattr(callback, name, value)
        for name, value in state["counters"].items():
            setattr(trainer, name, value)
        saved = {name: value for name, value in state.get("own", {}).items() if name in self._own}
        own = {name: getattr(trainer, name, None) for name in saved}
        Container(own, generator_state, set_generator_state).load(saved)
        vars(trainer).update(own)
        waiting = getattr(trainer, "_tr_loss", None)
        if isinstance(waiting, torch.Tensor) and state["loss"] is not None:
            waiting.fill_(state["loss"])
            # `train_loss` is of the steps of this call of `train`.
            trainer._total_loss_scalar = -state["loss"]

    def _changed(self) -> dict[str, Any]:
        """What is as it was when `train` began is the script's own business."""
        now = {name: getattr(self._trainer, name, None) for name in self._own}
        return {name: value for name, value in now.items() if value != self._own[name] and _is_plain(value)}

    def _exportable(self) -> list[Any]:
        """Callbacks with a state of their own, and the trainer's control flags."""
        trainer = self._trainer
        everybody = [*trainer.callback_handler.callbacks, trainer.control]
        return [each for each in everybody if callable(getattr(each, "state", None))]


def _names_of_library(kind: type) -> set[str]:
    """Attributes that transformers' own code reads or writes: it restores them itself, or makes them anew."""
    theirs = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "transformers"]
    codes = [value.__code__ for each in theirs for value in vars(each).values() if hasattr(value, "__code__")]
    return {name for code in codes for name in code.co_names}


def _is_plain(value: Any) -> bool:
    """Numbers, texts, and lists and dicts of such, as far as they are few enough to look at."""
    level, count = [value], 0
    for _ in range(_DEEP):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict) and all(type(key) is str for key in each):
                inside += each.values()
            elif type(each) in (list, deque):
                inside += each
            elif type(each) not in (bool, int, float, str, type(None)):
                return False
        count += len(inside)
        if not inside or count > _MANY:
            break
        level = inside
    else:
        return False
    return count <= _MANY


def plain(state: Any) -> dict[str, Any]:
    """A `TrainerState` as its own `save_to_json` writes it."""
    whole = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return json.loads(json.dumps(whole, default=_number))  # type: ignore[no-any-return]


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else None
