"""Going on in the middle of an order gives what the whole order gives from there, for every kind of sampler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from buoy.torch.data.order import Course, Order

COUNT = 70
DATA = list(range(COUNT))


class Lazy(Sampler[int]):
    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            yield random.randrange(COUNT)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "in turn": lambda: None,
    "shuffled": lambda: RandomSampler(DATA),
    "shuffled more than once": lambda: RandomSampler(DATA, num_samples=2 * COUNT + 3),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=100),
    "with a generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(1)),
    "weighted": lambda: WeightedRandomSampler(torch.ones(COUNT), 90),
    "a subset": lambda: SubsetRandomSampler(range(40)),
    "distributed": lambda: DistributedSampler(DATA, num_replicas=2, rank=1),
    "a list": lambda: [3, 1, 4, 1, 5, 9, 2, 6],
    "lazy": Lazy,
}  # fmt: skip


def keys(sampler: Any, skip: int, **settings: Any) -> list[Any]:
    order = Order(DataLoader(DATA, sampler=sampler, **settings))  # type: ignore[arg-type]
    order.begin(Course(5, 6, skip), None)
    before = torch.get_rng_state(), random.getstate()
    drawn = list(order)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    return drawn


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_rest_of_an_order_is_the_same_from_any_place(name: str, drop_last: bool) -> None:
    make = SAMPLERS[name]
    whole = keys(make(), 0, batch_size=4, drop_last=drop_last)
    sizes = [len(batch) for batch in whole]

    for batches in range(len(whole) + 1):
        rest = keys(make(), sum(sizes[:batches]), batch_size=4, drop_last=drop_last)
        assert rest == whole[batches:]


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_place_counts_samples_so_that_the_batch_may_have_another_size(name: str) -> None:
    make = SAMPLERS[name]
    whole = [key for batch in keys(make(), 0, batch_size=4) for key in batch]

    assert [key for batch in keys(make(), 4, batch_size=3) for key in batch] == whole[4:]


def test_without_batches_each_index_is_a_step() -> None:
    whole = keys(RandomSampler(DATA), 0, batch_size=None)

    assert len(whole) == COUNT
    assert keys(RandomSampler(DATA), 7, batch_size=None) == whole[7:]


def test_no_two_items_of_a_pass_are_seeded_alike() -> None:
    """Also not the same sample drawn twice."""
    drawn = [key for batch in keys(SAMPLERS["with replacement"](), 0, batch_size=4) for key in batch]

    assert len({seed for seed, _ in drawn}) == len(drawn) > len({index for _, index in drawn})
