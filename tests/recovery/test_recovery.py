"""A sample of `python -m tests.recovery`: a failed allocation anywhere in a step changes nothing about its result."""

from __future__ import annotations

import pytest

from tests.recovery.campaign import recover

SAMPLE = {
    "adamw foreach": 3,
    "sgd fused momentum": 5,
    "batchnorm and dropout": 7,
    "batchnorm that may not be split": 5,
    "checkpointed batchnorm": 7,
    "autocast with a scaler": 7,
    "accumulation of one's own": 5,
    "mean over tokens, tied weights": 7,
    "scheduler and averaged weights": 5,
}


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_later_step_is_recovered_bit_for_bit(name: str) -> None:
    outcome = recover(name, "later step", every=SAMPLE[name] // 2)

    assert outcome.points >= 5
    assert not outcome.wrong


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw foreach", "batchnorm and dropout"])
def test_the_first_step_is_recovered_bit_for_bit(name: str) -> None:
    """Optimizer state is being made; nothing is compared in it, so it allocates about half of what it once did."""
    outcome = recover(name, "first step", every=SAMPLE[name])

    assert outcome.points >= 5
    assert not outcome.wrong
