"""What a loss function keeps from call to call: as in the plain loop, and refused where a step must be retried."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import buoy
from buoy.microbatch.errors import CannotSplit

SEEN: list[int] = []
CALLS = 0


class Recurrent(nn.Module):
    """Goes on where the last batch ended, as truncated backpropagation through time does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, hidden = self.cell(x, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.out(made)  # type: ignore[no-any-return]


def in_an_attribute(model: Recurrent) -> Callable[[Any], Any]:
    return lambda part: F.mse_loss(model(part[0]), part[1])


def in_a_variable(model: Recurrent, hidden: Any = None) -> Callable[[Any], Any]:
    def loss(part: Any) -> Any:
        nonlocal hidden
        made, now = model.cell(part[0], hidden)
        hidden = tuple(part.detach() for part in now)
        return F.mse_loss(model.out(made), part[1])

    return loss


def in_place(model: Recurrent) -> Callable[[Any], Any]:
    hidden = torch.zeros(1, 8, 4), torch.zeros(1, 8, 4)

    def loss(part: Any) -> Any:
        made, now = model.cell(part[0], tuple(each.clone() for each in hidden))
        for old, new in zip(hidden, now, strict=True):
            old.copy_(new.detach())
        return F.mse_loss(model.out(made), part[1])

    return loss


class Trainer:
    """An object of a person's own."""

    def __init__(self, model: Recurrent) -> None:
        self.model, self.state = model, None

    def loss(self, scale: float, part: Any) -> Any:
        made, now = self.model.cell(part[0], self.state)
        self.state = tuple(each.detach() for each in now)  # type: ignore[assignment]
        return F.mse_loss(self.model.out(made), part[1]) * scale


def in_an_object(model: Recurrent) -> Callable[[Any], Any]:
    return functools.partial(Trainer(model).loss, 1.0)


PLACES = [in_an_attribute, in_a_variable, in_place, in_an_object]


def batches(many: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 5, 3, generator=source), torch.randn(8, 5, 2, generator=source)) for _ in range(many)
    ]


def trained(place: Any, guarded: bool, fail_at: int | None = None) -> list[float]:
    model = Recurrent()
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), place(model)
    run, losses, failed = buoy.Run(), [], []
    run.track(model=model, optimizer=optimizer)

    def fails_once(part: Any, number: int) -> Any:
        made = loss_fn(part)
        if number == fail_at and not failed:
            failed.append(number)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    for number, batch in enumerate(batches()):
        if guarded:
            loss = run.backward(batch, lambda part, number=number: fails_once(part, number))
        else:
            loss = loss_fn(batch)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("place", PLACES)
def test_a_state_between_batches_is_that_of_the_plain_loop(place: Any) -> None:
    assert trained(place, guarded=True) == trained(place, guarded=False)


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_state_forbids_a_second_try_in_words(place: Any, fail_at: int) -> None:
    """The failed try has moved it: a retry would give another gradient without a message."""
    with pytest.raises(CannotSplit, match="the loss function keeps state between calls") as caught:
        trained(place, guarded=True, fail_at=fail_at)

    assert "put the state into the batch" in (caught.value.hint or "")
    assert "buffer of a tracked module" in (caught.value.hint or "")


@pytest.mark.parametrize("place", [in_an_attribute, in_a_variable, in_an_object])
def test_a_state_forbids_a_bound_before_the_first_step(place: Any) -> None:
    model = Recurrent()
    run, loss_fn = buoy.Run(micro_batch=3), place(model)
    run.track(model=model)

    with pytest.raises(CannotSplit):
        run.backward(batches(1)[0], loss_fn)
    assert model.out.weight.grad is None


class Averaging(nn.Module):
    """A moving mean that the next batch reads: of one row, so that any number of samples fits."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(6, 4), None
        if is_buffer:
            del self.mean
            self.register_buffer("mean", torch.zeros(4))
        else:
            self.mean = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
        return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_state_in_a_buffer_of_a_tracked_module_is_restored(is_buffer: bool) -> None:
    """As the refusal's hint says."""
    found = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model, run, failed = Averaging(is_buffer), buoy.Run(), []
        run.track(model=model)

        def loss(
            part: torch.Tensor, model: Any = model, failed: list[int] = failed, guarded: bool = guarded
        ) -> Any:
            made = model(part).square().mean()
            if guarded and not failed:
                failed.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return made

        for seed in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            if not guarded:
                loss(x).backward()
            elif is_buffer:
                run.backward(x, loss)
            else:
                with pytest.raises(CannotSplit, match="keeps state"):
                    run.backward(x, loss)
                return
        found.append([model.mean, model.layer.weight.grad])

    assert all(map(torch.equal, *found))


def test_a_state_forbids_a_second_try_of_one_sample_too() -> None:
    """A single sample has no parts to compare: the same loss must come again."""
    model, run, seen = Averaging(False), buoy.Run(), []
    run.track(model=model)

    def loss(part: torch.Tensor) -> Any:
        made = model(part).square().mean()
        seen.append(1)
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    with pytest.raises(CannotSplit, match="keeps state"):
        run.backward(torch.randn(1, 6), loss)


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_pair_is_looked_at_in_its_first_step_and_must_come_again(is_stateful: bool) -> None:
    """(sum, weight) is computed more than once there, to see that it is one."""
    model, run = Averaging(False), buoy.Run()
    run.track(model=model)

    def loss(part: torch.Tensor) -> Any:
        made = model(part) if is_stateful else model.layer(part)
        return made.square().sum(), len(part)

    if not is_stateful:
        run.backward(torch.randn(8, 6), loss)
        return
    with pytest.raises(CannotSplit, match="keeps state") as caught:
        run.backward(torch.randn(8, 6), loss)
    assert "return the loss alone" in (caught.value.hint or "")


def test_a_state_that_is_in_the_batch_can_be_cut() -> None:
    """As the refusal's hint says."""
    found = []
    for micro_batch in (None, 3):
        model, state, rows = Recurrent().double(), torch.zeros(8, 4).double(), []
        run = buoy.Run(micro_batch=micro_batch)
        run.track(model=model)

        def loss(part: Any, model: Any = model, rows: list[Any] = rows) -> torch.Tensor:
            made, (new, _) = model.cell(part[0], (part[2][None], torch.zeros_like(part[2])[None]))
            rows.append(new[0].detach())
            return F.mse_loss(model.out(made), part[1])

        for x, y in batches():
            rows.clear()
            run.backward((x.double(), y.double(), state), loss)
            state = torch.cat(rows)[-len(x) :]  # what comes before was computed to compare
        found.append([state, *(parameter.grad for parameter in model.parameters())])

    assert all(map(torch.allclose, *found))  # type: ignore[arg-type]


class Noting(nn.Module):
    """Counts, remembers and caches, and reads none of that for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.calls, self.sizes, self.last = 0, Counter[int](), deque[int](maxlen=3)
        self.metrics = {"train": defaultdict[str, list[int]](list)}
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.metrics["train"]["rows"].append(len(x))
        self.sizes[len(x)] += 1
        self.last.append(len(x))
        if not hasattr(self, "table"):
            self.table = torch.arange(6.0)
        self.seen = made = self.layer(x + self.table)
        return made  # type: ignore[no-any-return]


def test_counters_and_lists_are_those_of_the_plain_loop_and_forbid_nothing() -> None:
    """A step that is computed once calls the loss function once; parts have one entry each beside the comparison's."""
    global CALLS
    for micro_batch, sizes in ((None, [16]), (5, [4, 4, 4, 4])):
        model, x = Noting(), torch.randn(16, 6)
        run, losses = buoy.Run(micro_batch=micro_batch), []
        run.track(model=model)
        SEEN.clear()
        CALLS = 0

        def loss(part: Any, model: Noting = model, losses: list[float] = losses) -> Any:
            global CALLS
            CALLS += 1
            SEEN.append(len(part))
            made = model(part).square().mean()
            losses.append(made.item())
            return made

        run.backward(x, loss)
        parts, model.layer.weight.grad = model.layer.weight.grad, None
        model(x).square().mean().backward()

        assert torch.allclose(parts, model.layer.weight.grad)  # type: ignore[arg-type]
        assert SEEN[-len(sizes) :] == sizes
        assert CALLS == len(losses) == len(SEEN)
        if micro_batch is None:
            assert sizes == SEEN
            assert model.metrics["train"]["rows"] == [*sizes, 16]


class Meter:
    """As in many a script."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Logging(nn.Module):
    """Notes its numbers in lists of dictionaries, and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.meter = nn.Linear(6, 4), Meter()
        self.history: dict[str, dict[str, list[int]]] = {"train": defaultdict(list), "val": {}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history["train"]["rows"].append(len(x))
        self.meter.update(1.0)
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_training_that_fits_is_counted_once() -> None:
    model, run = Logging(), buoy.Run()
    run.track(model=model)

    run.backward(torch.randn(16, 6), lambda part: model(part).square().mean())

    assert model.history == {"train": {"rows": [16]}, "val": {}}
    assert (model.meter.total, model.meter.count) == (1.0, 1)


class Recorded(nn.Module):
    """Has its hooks installed by the first forward pass, as transformers does to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "installed", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, given, made: self.made.append(made))
            self.installed = True
        self.made.clear()
        for layer in self.layers:
            x = layer(x)
        return torch.cat(self.made[-2:], -1)  # twice the last one, where hooks are there twice


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_hooks_that_the_first_forward_pass_installs_are_there_once(micro_batch: int | None) -> None:
    model, run, x = Recorded(), buoy.Run(micro_batch=micro_batch), torch.randn(8, 4)
    run.track(model=model)

    run.backward(x, lambda part: model(part).square().mean())
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()

    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1]
    assert all(map(torch.allclose, found, [parameter.grad for parameter in model.parameters()]))


class Rotary(nn.Module):
    """A table that grows with the longest sequence, and the number that says how far it reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.make(4)

    def make(self, length: int) -> None:
        self.reaches = length
        self.register_buffer("table", torch.arange(length * 6.0).view(length, 6).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.reaches:
            self.make(x.shape[1])
        return x * self.table[: x.shape[1]]


class Late(nn.Module):
    """Makes a table at its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.table, self.ready = torch.arange(6.0), True
        return x + self.table


@pytest.mark.parametrize("kind", [Rotary, Late])
@pytest.mark.parametrize("short_at", [0, 1])
def test_a_table_and_the_number_beside_it_go_back_together(kind: Any, short_at: int) -> None:
    """Memory runs out in the step that makes the table anew, the first one or a later one."""
    model, run = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 1)), buoy.Run()
    run.track(model=model)

    def loss(part: torch.Tensor) -> Any:
        made = model(part).square().mean()
        if step == short_at and len(part) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    for step in range(3):
        x = torch.randn(8, 3 if step < short_at else 9, 6)
        model.zero_grad()
        run.backward(x, loss)
        found, model[0].weight.grad = model[0].weight.grad, None
        model(x).square().mean().backward()

        assert torch.allclose(found, model[0].weight.grad, rtol=1e-4)


def test_a_counter_that_the_gradient_depends_on_is_refused() -> None:
    model = Noting()
    run = buoy.Run(micro_batch=5)
    run.track(model=model)

    with pytest.raises(CannotSplit, match="keeps state between calls"):
        run.backward(torch.randn(16, 6), lambda part: model(part).square().mean() * model.calls)


def test_a_trial_that_fails_ends_no_training_that_fits() -> None:
    model, tried = nn.Linear(6, 4), []
    run = buoy.Run()
    run.track(model=model)

    def loss(part: torch.Tensor) -> torch.Tensor:
        if len(part) != 16:
            print("few", len(part))
            raise KeyError("sixteen")
        return model(part).square().mean()

    for _ in range(5):
        run.backward(torch.randn(16, 6), loss)
        tried.append(model.weight.grad is not None)
    assert all(tried)


def test_a_bound_that_a_part_cannot_keep_is_told_once_and_the_batch_trained_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Boxes with the number of their image: cut only where by chance there are as many boxes as images."""
    model = nn.Conv2d(3, 4, 1)
    run = buoy.Run(micro_batch=3)
    run.track(model=model)

    def loss(part: Any) -> torch.Tensor:
        images, boxes = part
        return model(images)[boxes[:, 0].long()].square().mean()

    images = torch.randn(8, 3, 4, 4)
    for many in (8, 8, 14):
        run.backward((images, torch.arange(many)[:, None] % 8), loss)
        made, model.weight.grad = model.weight.grad, None
        loss((images, torch.arange(many)[:, None] % 8)).backward()

        assert torch.equal(made, model.weight.grad)  # type: ignore[arg-type]
        model.weight.grad = None
    said = capfd.readouterr().err
    assert said.count("ignoring micro_batch=3: this batch cannot be split") == 1


def test_a_bound_that_a_part_cannot_keep_ends_in_words_where_memory_needs_it() -> None:
    model = nn.Conv2d(3, 4, 1)
    run = buoy.Run(micro_batch=3)
    run.track(model=model)

    def loss(part: Any) -> torch.Tensor:
        made = model(part[0])[part[1][:, 0].long()].square().mean()
        if len(part[0]) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    with pytest.raises(CannotSplit) as caught:
        run.backward((torch.randn(8, 3, 4, 4), torch.arange(8)[:, None]), loss)
    assert "index" in (caught.value.received or "")


def test_a_loss_that_normalises_over_the_batch_is_refused_with_the_way_out() -> None:
    model = nn.Linear(6, 1)
    run = buoy.Run(micro_batch=3)
    run.track(model=model)

    def loss(part: Any) -> torch.Tensor:
        gain = (part[1] - part[1].mean()) / (part[1].std() + 1e-8)
        return (model(part[0])[:, 0] * gain).mean()

    with pytest.raises(CannotSplit) as caught:
        run.backward((torch.randn(8, 6), torch.randn(8)), loss)
    assert "`.std()`" in (caught.value.hint or "")
    assert "normalise before run.backward" in (caught.value.hint or "")


def test_hooks_that_clamp_gradients_are_named() -> None:
    model = nn.Linear(6, 4)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    run = buoy.Run(micro_batch=3)
    run.track(model=model)
    x = torch.randn(8, 6)

    with pytest.raises(CannotSplit, match="hooks of parameters"):
        run.backward(x, lambda part: model(part).square().mean())
    model(x).square().mean().backward()
    assert float(model.weight.grad.abs().max()) <= 0.0101, "the hooks are gone"  # type: ignore[union-attr]
