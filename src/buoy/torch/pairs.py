"""What a loss function returns as (sum, weight): a mean or an accuracy in it would be divided, or divide, unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buoy.microbatch.errors import BadLoss
from buoy.torch.backward import LossFunction

Pair = tuple[float, float]
_LEAST = 1e-4  # a sum beside a large term that is no sample's (a divergence of the weights) is nearly a mean
_FAR = 0.1  # a mean and a sum of several parts are far further apart


class NoPair(BadLoss):
    """Told with the first batch, although it fits: as it is, another loss would be trained than is meant."""


def noting(loss_fn: LossFunction, pairs: list[Pair]) -> LossFunction:
    """The loss function, and what it gives as a pair of numbers."""

    def noted(part: Any) -> Any:
        made = loss_fn(part)
        if isinstance(made, tuple) and len(made) == 2 and all(_is_number(each) for each in made):
            pairs.append((_read(made[0]), _read(made[1])))
        return made

    return noted


def check(whole: list[Pair], parts: list[Pair], sizes: Sequence[int], tolerance: float) -> None:
    """Raise where the whole has a mean over what its parts have."""
    if len(whole) != 1 or len(parts) != len(sizes):
        return
    (loss, weight), losses, weights = whole[0], [one for one, _ in parts], [other for _, other in parts]
    if all(each == weight for each in weights):
        return  # a constant, by which a person may well divide
    near = max(_LEAST, tolerance)
    if any(_is_mean(loss, losses, by, near) for by in (sizes, weights)) or _is_mean(
        weight, weights, sizes, near
    ):
        given = ", ".join(f"({one:.4g}, {other:.4g})" for one, other in parts[:3])
        raise NoPair(
            "what the loss function returns is not a sum and its weight",
            received=f"({loss:.4g}, {weight:.4g}) for {sum(sizes)} samples, and for parts of them {given}...: these do "
            "not add up",
            expected="only the loss; or (sum of the losses, how many), which is trained as their quotient",
            hint="return only the loss, and append an accuracy or a count to a list of your own",
        )


def _is_mean(value: float, parts: list[float], shares: Sequence[float], near: float) -> bool:
    total = sum(shares)
    if not total:
        return False
    mean = sum(part * share for part, share in zip(parts, shares, strict=True)) / total
    return abs(mean - value) <= near * abs(value) and _FAR * abs(value) < abs(sum(parts) - value)


def _read(value: Any) -> float:
    return float(value if isinstance(value, (int, float)) else value.detach())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1
