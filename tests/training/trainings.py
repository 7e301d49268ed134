"""Small trainings that use randomness in every place people use it; each is run whole, and killed and resumed."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import buoy
from buoy.testing import byte_budget

SAMPLES = 44
TRAININGS: dict[str, Callable[[Stage], None]] = {}


@dataclass
class Stage:
    """Where a training is run: its folder, its log, and the step at which it is killed."""

    folder: str
    log: str
    kill_at: int | None
    attempt: int
    """How many attempts there were before."""
    save: int = 3
    pause: float = 0.0
    """Seconds for each step, so that there is time to kill it from outside."""

    def run(self, **settings: Any) -> buoy.Run:
        return buoy.Run(self.folder, save=self.save, **settings)

    def step(self, number: int, *values: object) -> None:
        """A step is done: write down what it gave, to the last bit."""
        words = " ".join(_exact(value) for value in values)
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{number} {words}\n")
        time.sleep(self.pause)
        if number == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, *owners: Any) -> None:
        """The training is done: write down everything it holds."""
        digest = hashlib.sha256()
        for owner in owners:
            digest.update(_digest(owner.state_dict() if hasattr(owner, "state_dict") else owner).encode())
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"end {digest.hexdigest()}\n")


def _exact(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
    return float(value).hex() if isinstance(value, float) else str(value)


def _digest(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_digest(item) for item in value) + "]"
    return _exact(value)


def training(function: Callable[[Stage], None]) -> Callable[[Stage], None]:
    TRAININGS[function.__name__] = function
    return function


class Augmented(Dataset[Any]):
    """Draws from all three global generators, as augmentations do; knows nothing of buoy."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 6, generator=generator)
        self.y = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(6) + 0.1 * np.random.normal() + (0.1 if random.random() < 0.5 else 0)
        return self.x[index] + noise, self.y[index]


class Centred(nn.Module):
    """Keeps means of what it sees in buffers that its state_dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(6), persistent=False)
        self.register_buffer("replaced", torch.zeros(6), persistent=False)
        self.register_buffer("later", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.written.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.replaced = 0.9 * self.replaced + 0.1 * x.detach().amax(0)
            self.later = x.detach()[:2] if self.later is None else torch.cat([self.later, x.detach()[:1]])
        return x - self.written - self.replaced - self.later.mean(0)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))


def plain_loop(
    stage: Stage,
    loader: Any,
    epochs: int = 2,
    noise: torch.Generator | None = None,
    save_epochs: bool = False,
    model: nn.Module | None = None,
    **tracked: Any,
) -> None:
    """The loop most people write."""
    model = model or network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = stage.run()
    run.track(model=model, optimizer=optimizer, **tracked)
    for epoch in run.epochs(epochs):
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for x, y in run.batches(loader):
            if noise is not None:
                x = x + torch.randn(6, generator=noise)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            stage.step(run.step, loss.item(), x)
        if save_epochs:
            run.save()
    stage.end(model, optimizer)


@training
def unfreezing(stage: Stage) -> None:
    """The head first; in the second epoch the layers before it too, in a group with a rate of its own."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": model[4].parameters()}, {"params": model[0].parameters(), "lr": 1e-3}], lr=1e-2
    )
    run = stage.run()
    run.track(model=model, optimizer=optimizer)
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    for epoch in run.epochs(4):
        if epoch == 1:
            model[0].requires_grad_(True)
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            stage.step(run.step, loss.item(), len(optimizer.param_groups))
    stage.end(model, optimizer)


class Mixing:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def collate(self, items: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(items)
        return x + float(self.generator.normal()) * x[self.generator.permutation(len(x))], y


@training
def collate_with_a_generator(stage: Stage) -> None:
    plain_loop(stage, DataLoader(Augmented(), 8, collate_fn=Mixing().collate, num_workers=stage.attempt % 2))


@training
def everything(stage: Stage) -> None:
    """Mixed precision, scaler, schedule by batch, EMA, dropout, batch norm; no workers."""
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    model = network()
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=3 * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    run = stage.run()
    run.track(model=model, ema=ema, optimizer=optimizer, schedule=schedule, scaler=scaler, loader=loader)
    for _ in run.epochs(3):
        for x, y in run.batches(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            ema.update_parameters(model)
            stage.step(run.step, loss.item(), x, schedule.get_last_lr()[0], scaler.get_scale())
    stage.end(model, ema, optimizer, schedule, scaler)


@training
def changing_workers(stage: Stage) -> None:
    """Augmentation inside the workers, whose number is another one in every attempt."""
    workers = [2, 0, 1, 2][stage.attempt % 4]
    plain_loop(
        stage,
        DataLoader(
            Augmented(), batch_size=8, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        ),
    )


class ByBatch(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def reseed(worker: int) -> None:
    """What people write against equal augmentations in all workers; and it opens something on its dataset."""
    random.seed(99 + worker)
    np.random.seed(99)
    information = get_worker_info()
    assert information is not None and type(information.dataset) is ByBatch


@training
def spawned_workers(stage: Stage) -> None:
    """Workers started anew, an init function that seeds them all alike, items fetched by the batch, a last dropped."""
    plain_loop(
        stage,
        DataLoader(
            ByBatch(28), batch_size=8, shuffle=True, drop_last=True, num_workers=1,
            worker_init_fn=reseed, multiprocessing_context="spawn", prefetch_factor=4, persistent_workers=True,
        ),
        epochs=3,
    )  # fmt: skip


@training
def accumulation(stage: Stage) -> None:
    """The user's own accumulation over four batches, with a step at the end of the epoch for the rest."""
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run = stage.run()
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(3):
        for x, y in run.batches(loader):
            loss = functional.cross_entropy(model(x), y) / 4
            loss.backward()
            if run.batch % 4 == 0 or run.batch == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                stage.step(run.step, loss.item(), x)
    stage.end(model, optimizer)


class Jitter:
    """A transform with a generator of its own, as augmentation libraries have them."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * float(self.generator.normal())


class OwnRandomness(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.transforms = [Jitter()]
        self.generator = torch.Generator().manual_seed(2)
        self.random = random.Random(3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index] + 0.1 * torch.randn(6, generator=self.generator) + self.random.random()
        return self.transforms[0](x), self.y[index]


@training
def own_randomness(stage: Stage) -> None:
    """Generators that belong to the dataset and its transforms, in another number of workers each time."""
    workers = [1, 0, 2][stage.attempt % 3]
    plain_loop(stage, DataLoader(OwnRandomness(), batch_size=8, shuffle=True, num_workers=workers))


class LazySampler(Sampler[int]):
    """Draws each index from python's global generator, only when it is asked for it."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)


@training
def lazy_sampler(stage: Stage) -> None:
    plain_loop(stage, DataLoader(Augmented(), batch_size=8, sampler=LazySampler(), num_workers=1))


class OwnGenerator(Sampler[list[int]]):
    """A batch sampler with a generator of its own, and batches of several sizes."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)
        self.rounds = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        self.rounds += 1
        order = self.generator.permutation(SAMPLES).tolist()
        for start in range(0, 40, 5):
            yield order[start : start + 2 + (start + self.rounds) % 4]


@training
def buffers_beside_the_state_dict(stage: Stage) -> None:
    plain_loop(stage, DataLoader(Augmented(), batch_size=8), model=nn.Sequential(Centred(), network()))


@training
def own_generators(stage: Stage) -> None:
    plain_loop(stage, DataLoader(Augmented(), batch_sampler=OwnGenerator()), save_epochs=True)


@training
def loader_generator(stage: Stage) -> None:
    """One of the loader's own and one of the loop's; workers ask the sampler ahead."""
    generator, noise = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True, generator=generator, num_workers=1)
    plain_loop(stage, loader, epochs=3, noise=noise, save_epochs=True, drawn=noise)


@training
def tracked_generator(stage: Stage) -> None:
    """The loader's is tracked by name; a sampler draws from it along the way."""
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(Augmented(), replacement=True, num_samples=70, generator=generator)
    loader = DataLoader(Augmented(), batch_size=8, sampler=sampler, generator=generator)
    plain_loop(stage, loader, epochs=3, generator=generator)


@training
def standard_samplers(stage: Stage) -> None:
    """Two loaders side by side: weighted with replacement, and a random subset."""
    weights = torch.arange(1.0, SAMPLES + 1)
    first = DataLoader(Augmented(), batch_size=8, sampler=WeightedRandomSampler(weights, 40))
    second = DataLoader(Augmented(), batch_size=4, sampler=SubsetRandomSampler(range(20)))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = stage.run()
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(3):
        for (x, y), (more_x, more_y) in zip(run.batches(first), run.batches(second), strict=True):
            loss = functional.cross_entropy(model(torch.cat([x, more_x])), torch.cat([y, more_y]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stage.step(run.step, loss.item(), x, more_x)
    stage.end(model, optimizer)


@training
def distributed_sampler(stage: Stage) -> None:
    data = Augmented()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1)
    plain_loop(stage, DataLoader(data, batch_size=4, sampler=sampler))


@training
def with_replacement(stage: Stage) -> None:
    data = Augmented()
    sampler = RandomSampler(data, replacement=True, num_samples=50)
    plain_loop(stage, DataLoader(data, batch_size=8, sampler=sampler))


class Shuffled(IterableDataset[Any]):
    """Goes forward only, through a buffer that it shuffles with the global generator."""

    def __iter__(self) -> Iterator[Any]:
        information = get_worker_info()
        share, of = (information.id, information.num_workers) if information else (0, 1)
        held: list[Any] = []
        data = Augmented()
        for index in range(share, len(data), of):
            held.append(data[index])
            if len(held) == 8:
                yield held.pop(random.randrange(8))
        random.shuffle(held)
        yield from held


@training
def iterable(stage: Stage) -> None:
    plain_loop(stage, DataLoader(Shuffled(), batch_size=8))


@training
def iterable_in_workers(stage: Stage) -> None:
    generator = torch.Generator().manual_seed(4)
    plain_loop(stage, DataLoader(Shuffled(), batch_size=8, num_workers=2, generator=generator))


class SharedList(IterableDataset[Any]):
    """Every worker shuffles the same list with a generator of its own, seeded alike, and takes its share."""

    def __init__(self) -> None:
        self.data = OwnRandomness()
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        information = get_worker_info()
        assert information is not None and type(information.dataset) is SharedList
        indices = list(range(len(self.data)))
        self.random.shuffle(indices)
        for index in indices[information.id :: information.num_workers]:
            x, y = self.data[index]
            yield x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.rand()), y


class Counting(IterableDataset[Any]):
    """An iterable dataset that can say where it is."""

    def __init__(self) -> None:
        self.data = Augmented()
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.data):
            self.at += 1
            self.read += 1
            yield self.data[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@training
def iterable_with_a_state(stage: Stage) -> None:
    data = Counting()
    plain_loop(stage, DataLoader(data, batch_size=8))
    if stage.attempt:
        assert data.read < 2 * len(data.data), "it read again what it had read before"


@training
def stateful_loader(stage: Stage) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    plain_loop(stage, StatefulDataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=1))


@training
def stateful_loader_of_a_stream(stage: Stage) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    plain_loop(stage, StatefulDataLoader(Counting(), batch_size=8, num_workers=0))


@training
def an_endless_second_loader(stage: Stage) -> None:
    """Labelled and unlabelled data, the second loader begun again whenever it is exhausted; two optimizers."""
    labelled = DataLoader(Augmented(), batch_size=4, shuffle=True)
    unlabelled = DataLoader(Augmented(20), batch_size=4, shuffle=True)
    model, head = network(), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = torch.optim.SGD(head.parameters(), lr=1e-2)
    run = stage.run()
    run.track(model=model, head=head, optimizer=optimizer, other=other)
    for _ in run.epochs(2):
        more = iter(run.batches(unlabelled))
        for x, y in run.batches(labelled):
            hidden = model(x)
            try:
                extra, _ = next(more)
            except StopIteration:
                more = iter(run.batches(unlabelled))
                extra, _ = next(more)
            loss = functional.cross_entropy(head(hidden), y) + model(extra).square().mean()
            for each in (optimizer, other):
                each.zero_grad()
            loss.backward()
            for each in (optimizer, other):
                each.step()
            stage.step(run.step, loss.item(), x, extra)
    stage.end(model, head, optimizer, other)


@training
def micro_batches(stage: Stage) -> None:
    """Each batch in parts of three, through `run.backward`."""
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = stage.run(micro_batch=3)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for batch in run.batches(loader):
            loss = run.backward(batch, lambda part: functional.cross_entropy(model(part[0]), part[1]))
            optimizer.step()
            optimizer.zero_grad()
            stage.step(run.step, loss.item(), batch[0])
    stage.end(model, optimizer)


@training
def changing_micro_batches(stage: Stage) -> None:
    """Memory is short at step 4, and again at step 20, where the micro-batch would grow; at step 21 it grows.

    Each shortage comes once in a run: when the step is done again after a kill, only the log can tell.
    """
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    # Eight samples need far more than the comparison of two, which is made when memory is short.
    bends = [nn.Sigmoid(), nn.Tanh()] * 8
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Dropout(0.3), *bends, nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = stage.run()
    run.track(model=model, optimizer=optimizer)
    last: list[int] = []

    def loss_of(part: list[torch.Tensor]) -> torch.Tensor:
        last[:] = [*last[-7:], len(part[0])]
        return functional.cross_entropy(model(part[0]), part[1])

    with byte_budget("1GiB") as device:
        for _ in run.epochs(4):
            for batch in run.batches(loader):
                met = f"{stage.folder}.short-{run.step + 1}"
                if run.step + 1 in (4, 20) and not os.path.exists(met):
                    open(met, "w").close()
                    device.size = device.live + 84_000  # gradients, and the activations of two samples
                loss = run.backward(batch, loss_of)
                device.size = 1 << 30
                optimizer.step()
                optimizer.zero_grad()
                stage.step(run.step, loss.item(), batch[0], last[-1])
    stage.end(model, optimizer)


@training
def compiled(stage: Stage) -> None:
    """A compiled model whose fourth step does not fit; its names in the checkpoint are those of the plain one."""
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
    model = torch.compile(plain, backend="aot_eager", dynamic=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    run = stage.run()
    run.track(model=model, optimizer=optimizer)

    def loss_of(part: list[torch.Tensor]) -> torch.Tensor:
        loss = functional.cross_entropy(model(part[0]), part[1])
        if run.step == 3 and len(part[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    for _ in run.epochs(2):
        for batch in run.batches(loader):
            loss = run.backward(batch, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            stage.step(run.step, loss.item(), batch[0])
    stage.end(plain, optimizer)


def train_and_evaluate(stage: Stage, run: buoy.Run, epochs: Any) -> None:
    train = DataLoader(Augmented(), batch_size=8, shuffle=True)
    test = DataLoader(Augmented(20), batch_size=8)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    history: list[float] = []
    counters = {"best": float("inf"), "epochs": 0}
    run.track(model=model, optimizer=optimizer, schedule=schedule, history=history, counters=counters)
    for _ in epochs:
        order = torch.randperm(3)  # drawn before the loop: must be the same again
        model.train()
        for x, y in run.batches(train):
            loss = functional.cross_entropy(model(x)[:, order], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stage.step(run.step, loss.item(), x, order, schedule.get_last_lr()[0])
        schedule.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in run.batches(test):
                total += functional.cross_entropy(model(x), y).item()
        history.append(total)
        counters["best"] = min(counters["best"], total)
        counters["epochs"] += 1
        run.metric(total=total)
    stage.step(1000 + run.step, *history, counters["best"], counters["epochs"])
    stage.end(model, optimizer, schedule)


@training
def evaluation(stage: Stage) -> None:
    """A schedule by epoch, an evaluation after each, results kept in a list and a dict."""
    run = stage.run()
    train_and_evaluate(stage, run, run.epochs(3))


@training
def changes_before_the_loop(stage: Stage) -> None:
    """What is tracked is changed at each epoch's start: a schedule, a sum, a state carried from batch to batch."""
    model = nn.RNNCell(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    carried: dict[str, Any] = {"sum": 0.0, "hidden": None}
    run = stage.run()
    run.track(model=model, optimizer=optimizer, schedule=schedule, carried=carried)
    for epoch in run.epochs(3):
        carried.update(sum=0.0, hidden=torch.randn(4, 3))
        if epoch:
            schedule.step()
        for x, y in run.batches(DataLoader(Augmented(), batch_size=4, shuffle=True)):
            optimizer.zero_grad()
            hidden = model(x, carried["hidden"])
            loss = functional.cross_entropy(hidden, y)
            loss.backward()
            optimizer.step()
            carried.update(sum=carried["sum"] + loss.item(), hidden=hidden.detach())
            stage.step(
                run.step, carried["sum"], carried["hidden"], optimizer.param_groups[0]["lr"], random.random()
            )
    stage.end(model, optimizer, carried)


@training
def without_epochs(stage: Stage) -> None:
    """The same with the user's own loop over epochs: the script comes by the same way again."""
    train_and_evaluate(stage, stage.run(), range(3))


@training
def notebook_style(stage: Stage) -> None:
    """A list of batches, no optimizer that buoy knows, a seed given, saves asked for by hand."""
    batches = list(itertools.batched(range(20), 4)) if hasattr(itertools, "batched") else [[1], [2], [3], [4]]
    sums = {"sum": 0.0}
    with buoy.Run(stage.folder, save="1h", seed=11) as run:
        run.track(sums=sums)
        for _ in run.epochs(3):
            for batch in run.batches(batches):
                sums["sum"] += sum(batch) * random.random()
                stage.step(run.step, sums["sum"])
                if run.batch == 2:
                    run.save()
    stage.end(sums)
