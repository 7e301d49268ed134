"""A training killed with SIGKILL and resumed gives, step by step and bit by bit, what the uninterrupted one gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.guards.lives import assert_goes_on
from tests.processes import answers

# Each training, and the steps at which its attempts are killed (they save every third step).
KILLS = {
    "everything": [5, 13],
    "changing_workers": [4, 8, 10],
    "spawned_workers": [4],
    "accumulation": [4, 7],
    "own_randomness": [5, 8],
    "lazy_sampler": [5],
    "buffers_beside_the_state_dict": [8],
    "unfreezing": [8, 17],
    "collate_with_a_generator": [5],
    "own_generators": [9, 13],
    "loader_generator": [7, 14],
    "tracked_generator": [9],
    "standard_samplers": [8],
    "distributed_sampler": [8],
    "with_replacement": [9],
    "iterable": [5, 8],
    "iterable_in_workers": [8, 11],
    "iterable_with_a_state": [5, 7],
    "stateful_loader": [4],
    "stateful_loader_of_a_stream": [4],
    "an_endless_second_loader": [13, 17],
    "micro_batches": [7],
    "changing_micro_batches": [4, 20, 23],
    "compiled": [8],
    "evaluation": [7, 13],
    "changes_before_the_loop": [5, 16],
    "without_epochs": [7, 12],
    "notebook_style": [7],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("trainings")
    with answers(
        {name: [name, steps] for name, steps in KILLS.items()}, "tests.training.warm", str(folder)
    ) as each:
        yield each


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_training_goes_on_bit_for_bit(name: str, results: Mapping[str, Any]) -> None:
    assert_goes_on(results[name], KILLS[name])


def test_every_training_is_tried() -> None:
    from tests.training.trainings import TRAININGS

    assert set(TRAININGS) == set(KILLS)
