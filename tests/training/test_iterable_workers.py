"""Data whose randomness a resume cannot find again: it is warned about once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from buoy.torch.data.loader import Feeds, Pass, Place


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        yield from torch.rand(4).tolist()


def left(walk: Pass) -> list[Any]:
    return list(iter(lambda: next(walk, None), None))


def test_workers_of_a_stream_that_stay_from_pass_to_pass_are_warned_about_once() -> None:
    said: list[str] = []
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True)
    feeds = Feeds(said.append)
    for epoch in range(2):
        left(feeds.open(loader, Place(7, 0, epoch, 0), None))

    assert len(said) == 1 and "will not be bit for bit" in said[0] and "persistent_workers=False" in said[0]


def test_a_loop_that_draws_from_the_loaders_generator_is_warned_about_once() -> None:
    said: list[str] = []
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(range(8), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    feeds = Feeds(said.append)
    for draws in (False, True, True):
        walk = feeds.open(loader, Place(7, 0, 0, 0), None)
        for _ in range(3):
            next(walk)
            if draws:
                torch.rand(1, generator=generator)
            walk.state_dict()
        assert len(said) == draws

    assert "the loop draws from the generator of the loader" in said[0]
