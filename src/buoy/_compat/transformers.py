"""Hugging Face transformers' private names. Checked on 5.23."""

from __future__ import annotations

from typing import Any

import torch


def built_from_config(kind: Any, config: Any) -> Any:
    """A model of one class as its config says; only the Auto classes have a public name for it.

    Without it the class is called, which leaves out the attention kernel and precision that the config asks for.
    """
    make = getattr(kind, "_from_config", kind)
    return make(config)


LOADERS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
"""The methods by which a Trainer loads its own checkpoint: under a guard they load nothing. 4 has fewer."""
LOAD_CALLBACKS = "_load_callback_state"
"""The method by which it loads what callbacks have saved."""
FIND_PLACE = "_init_training_state"
"""The method that says how many epochs and batches are done (5); 4 computes it inside `train`."""
COUNTERS = ("_globalstep_last_logged", "current_flos")
"""What a Trainer counts beside its state: else the first logged loss and the flops after a resume are others."""


def missing(trainer: Any) -> list[str]:
    """What this version does not have, of what a guard needs to resume: the names."""
    needed = (*LOADERS[:2], "get_batch_samples", "training_step", "get_train_dataloader")
    return [name for name in needed if not hasattr(trainer, name)]


def waiting_loss(trainer: Any) -> torch.Tensor | None:
    """The loss that waits to be logged; None where the Trainer (4) keeps it to itself."""
    waiting = getattr(trainer, "_tr_loss", None)
    return waiting if isinstance(waiting, torch.Tensor) else None


def set_waiting_loss(trainer: Any, loss: float) -> None:
    """Make it this; `train_loss` is of the steps of this call of `train`."""
    waiting = waiting_loss(trainer)
    if waiting is not None:
        waiting.fill_(loss)
        trainer._total_loss_scalar = -loss
