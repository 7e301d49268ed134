"""Workers of an IterableDataset that stay from pass to pass: seeded for each, and still sharing out one list."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from buoy.torch.data import Feeds, Pass, Place


class SharedList(IterableDataset[Any]):
    """Workers shuffle one list alike, take turns in it, and add noise."""

    noise: random.Random

    def __iter__(self) -> Iterator[tuple[int, float]]:
        information = get_worker_info()
        assert information is not None
        indices = list(range(12))
        random.shuffle(indices)
        for index in indices[information.id :: information.num_workers]:
            yield index, float(self.noise.random())


def started_alike(worker: int) -> None:
    """For one order in all workers, with noise that is another one in each."""
    random.seed(5)
    information = get_worker_info()
    assert information is not None and isinstance(information.dataset, SharedList)
    information.dataset.noise = random.Random(worker)


class OfItsOwn(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def loader(kind: type[DataLoader[Any]] = DataLoader) -> DataLoader[Any]:
    return kind(
        SharedList(), batch_size=None, num_workers=2, persistent_workers=True, worker_init_fn=started_alike
    )


def left(opened: Pass) -> list[tuple[int, float]]:
    items = []
    while (item := next(opened, None)) is not None:
        items.append(item)
    return items


def test_each_pass_is_whole_and_another_one_and_the_same_in_another_process() -> None:
    said: list[str] = []
    feeds, mine = Feeds(said.append), loader()
    first = left(feeds.open(mine, Place(7, 0, 0, 0), None))
    left_early = feeds.open(mine, Place(7, 0, 1, 0), None)
    next(left_early)
    second = feeds.open(mine, Place(7, 0, 2, 0), None)
    begun = [next(second) for _ in range(5)]
    state = second.state_dict()
    rest = left(second)
    resumed = left(Feeds(said.append).open(loader(), Place(7, 0, 2, 0), state))

    assert (
        sorted(index for index, _ in first) == sorted(index for index, _ in begun + rest) == list(range(12))
    )
    assert len({noise for _, noise in first + begun + rest}) == 24
    assert [index for index, _ in first] != [index for index, _ in begun + rest]
    assert resumed == rest and said == []


def test_a_loader_that_iterates_in_a_way_of_its_own_is_told_once() -> None:
    said: list[str] = []
    feeds, mine = Feeds(said.append), loader(OfItsOwn)
    for epoch in range(2):
        left(feeds.open(mine, Place(7, 0, epoch, 0), None))

    assert len(said) == 1 and "will not be bit for bit" in said[0] and "persistent_workers=False" in said[0]
