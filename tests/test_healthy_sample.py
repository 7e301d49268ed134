"""A few of the healthy trainings of which no alarm may be given. The whole campaign is `make healthy`."""

from __future__ import annotations

import pytest

from tests.healthy import SHAPES, missing, run_shape

SAMPLE = ("slow save", "starved of CPU", "download of the next shard", "slow import", "cache that levels off")


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "starved of CPU" else ()) for name in SAMPLE],
)
def test_a_healthy_training_is_called_nothing_else(name: str) -> None:
    """A real process, its pauses and the patience with them scaled down alike."""
    lacking = missing(name)
    if lacking:
        pytest.skip(lacking)

    assert run_shape(name).false == ()


def test_there_are_at_least_twelve_shapes() -> None:
    assert len(SHAPES) >= 12
    assert set(SAMPLE) <= SHAPES.keys()
