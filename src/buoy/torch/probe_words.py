"""What is said of a comparison: of BatchNorm, of a part that fails, of a few samples without a loss."""

from __future__ import annotations

from typing import Any

import torch

from buoy.microbatch.errors import BadLoss, StepError


class PartError(Exception):
    """What a part of the samples raised, and all of them together did not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def words(self) -> str:
        """Its first line."""
        return f"a part of the batch fails: {str(self.error).partition(chr(10))[0]}"


def of_few(error: Exception) -> Exception:
    """Where a loss is not a number, this need not be so for the whole batch."""
    if isinstance(error, BadLoss) and "NaN" in error.message:
        error.received = (
            f"{error.received} for a few samples of the batch, computed to see whether it can be cut"
        )
        error.hint = (
            "where none of a few samples counts, their mean is 0 / 0: return (sum of the losses, how many); "
            f"otherwise: {error.hint}"
        )
    return error


def names_of(modules: list[torch.nn.Module], wanted: list[Any]) -> list[str]:
    """The wanted ones' names in their models."""
    ids = {id(module) for module in wanted}
    return [
        name or type(part).__name__ for m in modules for name, part in m.named_modules() if id(part) in ids
    ]


def batchnorm(names: list[str]) -> str | None:
    """Why they forbid a cut; None without any."""
    return f"{names[0]} is BatchNorm, which computes over all samples at once" if names else None


def hint_for(names: list[str], error: Exception | None = None) -> str:
    """What to do about these BatchNorms, or about what a part raised."""
    if names:
        return 'GroupNorm or LayerNorm in place of BatchNorm, a smaller batch; or inexact=("batchnorm",) to compute ' \
               "statistics over each micro-batch"  # fmt: skip
    if isinstance(error, StepError) and error.hint:
        return error.hint
    return "a smaller batch, or `split=` if the samples are not along the first dimension"
