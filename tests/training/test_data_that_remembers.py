"""Samplers, datasets and collate functions that keep something of their own from pass to pass, as people write them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

import buoy
from buoy.flight import recorder

SAMPLES = 12
RNG = np.random.default_rng(5)  # as a notebook has it at its top


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


class Buckets(Sampler[list[int]]):
    """Its batches are shuffled in place: each pass begins with what the last one has left."""

    def __init__(self) -> None:
        self.batches = [list(range(i, i + 4)) for i in range(0, SAMPLES, 4)]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        yield from self.batches


class InPlace(Sampler[int]):
    def __init__(self) -> None:
        self.order = np.arange(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class Stream(IterableDataset[Any]):
    """Counts its own passes, holds a generator, or shuffles its files in place."""

    def __init__(self, kind: str) -> None:
        self.kind, self.passes, self.rng = kind, 0, np.random.default_rng(3)
        self.files = [f"{i:02}" for i in range(SAMPLES)]

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "count":
            random.Random(self.passes).shuffle(order := list(self.files))
            self.passes += 1
        elif self.kind == "generator":
            order = self.rng.permutation(self.files).tolist()
        else:
            random.shuffle(self.files)
            order = self.files
        yield from (torch.tensor([float(name)]) for name in order)


class Rows:
    """Somebody's own class over which a loop goes; no DataLoader."""

    def __init__(self) -> None:
        self.order, self.rng = list(range(SAMPLES)), random.Random(2)

    def __iter__(self) -> Iterator[Any]:
        self.rng.shuffle(self.order)
        return (torch.tensor([[float(i)]]) for i in self.order)


class Noisy(Dataset[Any]):
    """Draws from a generator that its transform has from around it, without holding it."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.tensor([float(index)]))


class Slots:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.rng.random())


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + noise()


def noise() -> float:
    return float(RNG.random())


def mixing() -> Callable[[Any], torch.Tensor]:
    rng = np.random.default_rng(1)
    return lambda items: torch.stack([item[0] for item in items]) + float(rng.random())


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None])


def nodes() -> Any:
    """torchdata's own, over a sampler with a generator, which is not in their state."""
    sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(3))
    made = Mapper(SamplerWrapper(sampler), lambda index: index + torch.rand(1))
    return Loader(Mapper(Batcher(made, 4), torch.stack))


SOURCES: dict[str, Callable[[], Any]] = {
    "batches shuffled in place": lambda: DataLoader(numbers(), batch_sampler=Buckets()),
    "an array shuffled in place": lambda: DataLoader(numbers(), batch_size=4, sampler=InPlace()),
    "a stream that counts its passes": lambda: DataLoader(Stream("count"), batch_size=4),
    "a stream with a generator": lambda: DataLoader(Stream("generator"), batch_size=4),
    "a stream that shuffles its files": lambda: DataLoader(Stream("files"), batch_size=4),
    "streams in a chain": lambda: DataLoader(
        ChainDataset([Stream("count"), Stream("generator")]), batch_size=8
    ),
    "a class of one's own": Rows,
    "nodes of torchdata": nodes,
    "a collate function's closure": lambda: DataLoader(numbers(), batch_size=4, collate_fn=mixing()),
    "a generator in slots": lambda: DataLoader(Noisy(Slots()), batch_size=4),
    "a generator at the top of the script": lambda: DataLoader(Noisy(shifted), batch_size=4),
}


class Killed(Exception):  # noqa: N818 - says what happened
    pass


def train(folder: Path, passes: Callable[[], Any], kill_at: int = 0) -> dict[int, list[float]]:
    """Four epochs over what `passes` makes for each, killed after a step; the samples of each step."""
    global RNG
    RNG = np.random.default_rng(5)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: dict[int, list[float]] = {}
    run = buoy.Run(folder, save=1)
    run.track(model=model, optimizer=optimizer)
    try:
        for _ in run.epochs(4):
            for batch in run.batches(passes()):
                x = batch[0] if isinstance(batch, list) else batch
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                seen[run.step] = x.flatten().tolist()
                if run.step == kill_at:
                    raise Killed
    finally:
        run.finish()
    return seen


def again_after_a_kill(
    folder: Path, source: Callable[[], Callable[[], Any]], kill_at: int
) -> tuple[Any, Any]:
    """The steps after a kill, in the training that goes on and in the one that was never killed."""
    whole = train(folder / "whole", source())
    with pytest.raises(Killed):
        train(folder / "run", source(), kill_at)
    rest = train(folder / "run", source())
    assert rest.keys() == {step for step in whole if step >= kill_at}
    return rest, {step: whole[step] for step in rest}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("when", ["in the middle of a pass", "at the end of a pass"])
def test_a_later_pass_goes_on_as_it_would_have(
    name: str, when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def source() -> Callable[[], Any]:
        loader = SOURCES[name]()
        return lambda: loader

    steps_of_a_pass = len(list(SOURCES[name]()))
    kill_at = 2 * steps_of_a_pass + (2 if when == "in the middle of a pass" else 1)

    rest, expected = again_after_a_kill(tmp_path, source, kill_at)

    assert rest == expected
    assert "not bit for bit" not in capsys.readouterr().err


class Items(Noisy):
    def __init__(self) -> None:
        super().__init__(torch.clone)
        self.items = list(range(SAMPLES))

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.items[index])


def shuffled_by_the_script(kind: str) -> Callable[[], Any]:
    """Between two passes the script shuffles, in place, a list that is not tracked."""
    dataset = Items()
    loader = DataLoader(dataset, batch_size=4)

    def next_pass() -> Any:
        random.shuffle(dataset.items)
        batches = [torch.tensor([[float(i)] for i in dataset.items[at : at + 4]]) for at in (0, 4, 8)]
        return {"dataset": loader, "list": batches, "generator": iter(batches)}[kind]

    return next_pass


@pytest.mark.parametrize("kind", ["dataset", "list", "generator"])
def test_data_that_does_not_come_again_is_told(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last batch before the checkpoint is made once more, and compared."""
    rest, expected = again_after_a_kill(tmp_path, lambda: shuffled_by_the_script(kind), 8)

    assert rest != expected  # or there would be nothing to tell
    told = capsys.readouterr().err
    assert told.count("this resume is not bit for bit: batch 1 of this pass, made again") == 1


def test_epochs_without_batches_draw_on_after_a_resume(tmp_path: Path) -> None:
    """Random state is put back once, where the run goes on, and not again at each epoch."""

    def draws(kill_at: int = -1) -> dict[int, float]:
        torch.manual_seed(1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = buoy.Run(folder, save=1)
        run.track(model=model, optimizer=optimizer)
        drawn: dict[int, float] = {}
        try:
            for epoch in run.epochs(6):
                if epoch == kill_at:
                    raise Killed
                drawn[epoch] = float(torch.rand(()))
                model(torch.ones(1)).backward()
                optimizer.step()
        finally:
            run.finish()
        return drawn

    folder = tmp_path / "whole"
    whole = draws()
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        draws(3)

    assert draws() == {epoch: whole[epoch] for epoch in (3, 4, 5)}
