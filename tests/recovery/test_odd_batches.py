"""A loss without weight, and a list whose entries may be samples: said in words, never computed as something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import buoy
from buoy.microbatch.errors import BadLoss, CannotSplit, OutOfMemory
from buoy.torch.step.transaction import Transaction


def a_run(micro_batch: int | None) -> tuple[nn.Module, buoy.Run]:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    run = buoy.Run(micro_batch=micro_batch)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return model, run


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("weight", [0, -1, torch.tensor(0), torch.tensor(-2.0)])
def test_a_weight_that_is_no_number_of_anything_is_refused_cut_and_uncut(
    micro_batch: int | None, weight: Any
) -> None:
    model, run = a_run(micro_batch)

    with pytest.raises(BadLoss, match="weight") as caught:
        run.backward(torch.ones(8, 6), lambda part: (model(part).square().sum(), weight))

    assert f"a weight of {float(weight):g}" in (caught.value.received or "")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_part_without_weight_counts_for_nothing() -> None:
    x, counted = torch.randn(8, 6), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    found = []
    for micro_batch in (None, 3):
        model, run = a_run(micro_batch)
        run.backward(
            (x, counted),
            lambda part, model=model: ((model(part[0]).square().sum(1) * part[1]).sum(), part[1].sum()),
        )
        found.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]

    assert all(map(torch.allclose, *found))


def test_a_list_of_samples_is_refused_with_the_way_to_cut_it() -> None:
    model, run = a_run(3)
    samples = list(torch.randn(8, 6))

    with pytest.raises(CannotSplit) as caught:
        run.backward(samples, lambda part: model(torch.stack(part)).square().mean())

    assert "split=(len(batch), lambda start, stop: batch[start:stop])" in (caught.value.hint or "")
    assert "cut before" not in (caught.value.hint or "")
    run.backward(
        samples,
        lambda part: model(torch.stack(part)).square().mean(),
        split=(8, lambda start, stop: samples[start:stop]),
    )
    parts = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    model(torch.stack(samples)).square().mean().backward()
    assert all(torch.allclose(one, other.grad) for one, other in zip(parts, model.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("many", "told"), [(2, 0), (8, 1)])
def test_a_list_that_is_cut_inside_its_entries_is_told(
    many: int, told: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two are mostly inputs and labels."""
    model, run = a_run(3)
    for _ in range(2):
        run.backward(
            [torch.randn(5, 6) for _ in range(many)],
            lambda part: torch.stack([model(one).square().mean() for one in part]).mean(),
        )

    said = capfd.readouterr().err
    assert said.count(f"a list of {many} arrays of shape [5, 6] is split along their first dimension") == told


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_nested_tensor_trains_whole(micro_batch: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    model, run = a_run(micro_batch)
    texts = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged)

    run.backward({"texts": texts, "size": 2}, lambda part: model(part["texts"]).values().square().mean())

    assert all(parameter.grad is not None for parameter in model.parameters())
    assert capfd.readouterr().err.count("differ in length") == (micro_batch is not None)


def test_a_long_error_of_a_part_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A sparse adjacency has no rows to pick; torch lists every kernel that there is."""
    model, run = a_run(3)
    batch = torch.randn(8, 6), torch.eye(8).to_sparse()

    run.backward(batch, lambda part: model(torch.sparse.mm(part[1], part[0])).square().mean())

    said = capfd.readouterr().err.strip()
    assert "cannot compute a few of its samples alone" in said
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize("rows", [(8, 8), (8, 9)], ids=["of one shape", "of two shapes"])
def test_a_list_of_images_that_counts_as_one_sample_is_told_how_to_be_cut(rows: tuple[int, int]) -> None:
    """Grey images have a first dimension of one: nothing says that each of them is a sample."""
    model = nn.Conv2d(1, 2, 3)
    transaction = Transaction(say=lambda words: None, event=lambda *a, **k: None)
    transaction.track([model], [torch.optim.SGD(model.parameters(), 0.1)])
    images = [torch.randn(1, rows[number % 2], 8) for number in range(6)]

    def loss(part: Any) -> torch.Tensor:
        if len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.stack([model(image).square().mean() for image in part]).mean()

    with pytest.raises(OutOfMemory, match="pass `split="):
        transaction.backward(images, loss)
    transaction.backward(images, loss, split=(6, lambda start, stop: images[start:stop]))


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_an_iterator_in_the_batch_is_gone_through_once_as_in_the_plain_loop(micro_batch: int | None) -> None:
    model, run = a_run(micro_batch)
    x, factors = torch.randn(8, 6), iter([1.0, 2.0, 3.0])

    run.backward((x, factors), lambda part: next(part[1]) * model(part[0]).square().mean())

    made = [parameter.grad for parameter in model.parameters()]
    asked = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert all(map(torch.equal, made, asked))
    assert next(factors) == 2.0


def test_a_step_that_has_used_an_iterator_up_is_not_done_again() -> None:
    _, run = a_run(None)
    tries: list[float] = []

    def loss(part: Any) -> torch.Tensor:
        tries.append(next(part[1]))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(CannotSplit, match="iterator"):
        run.backward((torch.randn(8, 6), iter([1.0, 2.0])), loss)

    assert tries == [1.0]
