"""What a Hugging Face trainer holds beside model and optimizer: its state, callbacks, and the loss not yet logged.

Hugging Face's `Trainer.training_step` as a transaction, whatever its loss is a mean of.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from buoy._compat.transformers import COUNTERS, set_waiting_loss, waiting_loss
from buoy.checkpoint.store import StoredTensor
from buoy.checkpoint.values import Container
from buoy.integrations.guarding import hint_in_a_trainer, samples_of
from buoy.microbatch.errors import BadLoss
from buoy.torch.data.rng import generator_state, set_generator_state
from buoy.torch.state.tensors import kept
from buoy.torch.step.transaction import Transaction

_OF_THIS_RUN = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
                "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
                "stateful_callbacks")  # fmt: skip
"""Fields that the arguments of this start decide."""
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
        counters = {name: getattr(trainer, name) for name in COUNTERS if hasattr(trainer, name)}
        waiting = waiting_loss(trainer)
        return {
            "state": plain(trainer.state),
            "callbacks": [(type(each).__name__, each.state()["attributes"]) for each in self._exportable()],
            "counters": counters,
            "loss": float(waiting) if waiting is not None else None,
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
        if state["loss"] is not None:
            set_waiting_loss(trainer, state["loss"])

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
    """Attributes that transformers' own code reads or writes: it restores them itself, or makes them again."""
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


_IGNORED = -100
MODES = ("sum", "tokens", "shifted tokens", "samples")
"""How the losses of parts make that of the whole: added up (already divided by the count of the whole step, as
`num_items_in_batch` is for), or weighted by tokens, by tokens after the shift of causal models, or by samples."""


class StepLoss:
    """The loss of a part, as `training_step` would have sent it to `accelerator.backward`."""

    modes = MODES

    def __init__(self, trainer: Any, training_step: Callable[..., Any]) -> None:
        self.mode = MODES[0]
        self.trainer = trainer
        self._training_step = training_step
        self._arguments: tuple[Any, ...] = ()
        self._samples = 0
        self._options: dict[str, Any] = {}
        self._loss: torch.Tensor | None = None

    def prepare(self, model: Any, rest: tuple[Any, ...], samples: int) -> None:
        """The step that is to be done."""
        self._arguments, self._samples = (model, *rest), samples

    def __call__(self, part: Any) -> Any:
        """What the transaction adds up, with `reduction="sum"`."""
        samples = samples_of(part)
        # The trainer may take them out of its inputs.
        labels = part.get("labels") if hasattr(part, "get") else None
        loss = self._capture(part)
        if samples == self._samples or self.mode == "sum":
            return loss
        if self.mode == "samples" or not isinstance(labels, torch.Tensor):
            return loss * samples, samples
        if self.mode == "shifted tokens":
            labels = labels[..., 1:]
        count = labels.ne(_IGNORED).sum()
        return torch.where(count > 0, loss, 0.0) * count, count  # a mean of nothing is no number

    def _capture(self, part: Any) -> torch.Tensor:
        accelerator = self.trainer.accelerator
        caught: list[torch.Tensor] = []

        def catch(loss: torch.Tensor, **options: Any) -> None:
            caught.append(loss)
            self._options = options

        model, *rest = self._arguments
        accelerator.backward = catch
        try:
            self._training_step(model, type(part)(part) if type(part) is dict else part, *rest)
        finally:
            vars(accelerator).pop("backward", None)
        if len(caught) != 1:
            raise BadLoss(
                "training_step does its own backward pass",
                received=f"{len(caught)} calls of accelerator.backward in it",
                expected="one",
                hint="a Trainer whose training_step computes gradients in a way of its own cannot be guarded",
            )
        return caught[0]

    # What stands for a gradient scaler: the loss goes through accelerate's own backward, scaling included.

    def scale(self, loss: torch.Tensor) -> StepLoss:
        """Take the loss of a part."""
        self._loss = loss
        return self

    def backward(self) -> None:
        """Its gradients."""
        loss, self._loss = self._loss, None
        self.trainer.accelerator.backward(loss, **self._options)


class StepTransaction(Transaction):
    """A transaction that finds out how the losses of parts add up."""

    def __init__(self, loss: StepLoss, **settings: Any) -> None:
        super().__init__(ways=loss, **settings)
        self._loss = loss

    def usable(self, hint: str) -> str:
        """In words of a Trainer."""
        return hint_in_a_trainer(
            hint,
            "a smaller per_device_train_batch_size, with gradient_accumulation_steps=... for as many per step",
        )

    def state_dict(self) -> dict[str, Any]:
        """Also how losses add up."""
        return {**super().state_dict(), "mode": self._loss.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        super().load_state_dict(state)
        self._loss.mode = state["mode"]
