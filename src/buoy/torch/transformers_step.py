"""Hugging Face's `Trainer.training_step` as a transaction, whatever its loss is a mean of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from buoy.microbatch.errors import BadLoss, StepError
from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.cutting import Cutting
from buoy.torch.few import SAMPLES
from buoy.torch.probe import Finding
from buoy.torch.transaction import Transaction
from buoy.torch.uncut import hint_in_a_trainer, samples_of

_IGNORED = -100
MODES = ("sum", "tokens", "shifted tokens", "samples")
"""How the losses of parts make that of the whole: added up (already divided by the count of the whole step, as
`num_items_in_batch` is for), or weighted by tokens, by tokens after the shift of causal models, or by samples."""


class StepLoss:
    """The loss of a part, as `training_step` would have sent it to `accelerator.backward`."""

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
        super().__init__(**settings)
        self._loss = loss
        self._before.carried.watch([], [loss.trainer])
        self._cutting = _Choosing(
            loss, self._modules, self._trained, self._before.carried, self._inexact, self._before.guarded
        )

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


class _Choosing(Cutting):
    """Asks about one way to add up after the other, until one gives the gradient of the whole."""

    def __init__(self, loss: StepLoss, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loss = loss
        self._modes: dict[Hashable, str] = {}

    def refusal(self, whole: Batch) -> StepError | None:
        """Each kind of step has the way that was found for it."""
        refused = super().refusal(whole)
        self._loss.mode = self._modes.get(self._kind, self._loss.mode)
        return refused

    def _ask(
        self, whole: Batch, loss_fn: LossFunction, reduction: str, samples: int = SAMPLES
    ) -> Finding | None:
        before, first = self._loss.mode, None
        for mode in sorted(MODES, key=lambda mode: mode != before):
            self._loss.mode = mode
            found = super()._ask(whole, loss_fn, reduction, samples)
            if found is not None and found.reason is None:
                self._modes[self._kind] = mode
                return found
            first = first or found
            if found is None:
                break  # nothing can be told with this batch
        self._loss.mode = before
        return first
