"""Fail every allocating operation of a step in turn; after recovery all must equal an undisturbed step, bit for bit.

The undisturbed step uses the micro-batches that the disturbed one ended with.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from buoy.testing import every_allocation
from tests.recovery.models import MODELS, Trainer

WARM = {"first step": 0, "later step": 2}


@dataclass
class Outcome:
    """What became of one model."""

    name: str
    points: int = 0
    exact: int = 0
    wrong: list[str] = field(default_factory=list)


def recover(name: str, moment: str, *, every: int = 1) -> Outcome:
    """One model; `every` n-th allocation only, for a sample."""
    warm = WARM[moment]
    outcome = Outcome(f"{name}, {moment}")
    references: dict[str, dict[str, Any]] = {}

    def work(trainer: Trainer) -> None:
        trainer.step(warm)

    for failure in every_allocation(work, lambda: Trainer(MODELS[name], warm), smallest=1):
        if (failure.number - 1) % every:
            continue
        outcome.points += 1
        where = f"{failure.operation} (allocation {failure.number})"
        if failure.error is not None:
            outcome.wrong.append(f"{where}: {failure.error!r}"[:300])
            continue
        state = failure.subject.state()
        sizes = failure.subject.transaction.sizes
        key = repr(sizes)
        if key not in references:
            references[key] = undisturbed(name, warm, sizes)
        different = [k for k in state if not same(state[k], references[key].get(k))]
        if different or state.keys() != references[key].keys():
            outcome.wrong.append(f"{where}: {', '.join(different[:6])} differ")
        else:
            outcome.exact += 1
    return outcome


def undisturbed(name: str, warm: int, sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """The same steps with the same sizes, and nothing failing."""
    trainer = Trainer(MODELS[name], 0, ahead=warm)
    trainer.transaction.replay([*sizes, {"step": 1 << 30, "samples": None}])
    for number in range(warm + 1):
        trainer.step(number)
    assert trainer.transaction.retries == 0
    return trainer.state()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


# For processes that share the work.


def prepare() -> None:
    torch.set_num_threads(1)
    undisturbed("dropout", 0, [])  # loads what torch loads at the first step
    gc.freeze()  # each recovery collects garbage: let it not walk over all of torch


def recover_case(case: tuple[str, str]) -> Outcome:
    return recover(*case)
