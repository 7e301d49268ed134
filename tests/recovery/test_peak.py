"""When not even one or two samples fit, the error names what owns the memory and the remedies that act on that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buoy
from buoy.microbatch.errors import OutOfMemory
from buoy.testing import byte_budget

IMAGES = torch.randn(4, 3, 128, 128, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
    )


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))


def refused(model: nn.Module, batch: torch.Tensor, room: int, beside: int = 0, **options: object) -> str:
    """The error of a second step that finds so many bytes free, and so many held by others."""
    optimizer = torch.optim.AdamW(model.parameters())
    run = buoy.Run(**options)  # type: ignore[arg-type]
    run.track(model=model, optimizer=optimizer)

    def loss(part: torch.Tensor) -> torch.Tensor:
        return model(part).square().mean()  # type: ignore[no-any-return]

    with byte_budget("8GiB") as device:
        run.backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
        kept = torch.zeros(beside)
        device.size = device.live + room
        with pytest.raises(OutOfMemory) as caught:
            run.backward(batch, loss)
    del kept
    return str(caught.value)


def test_activations_own_the_memory() -> None:
    said = refused(convolutions(), IMAGES, 3 << 20)

    # Two are what a comparison needs, without which no batch is split.
    assert said.startswith("two samples do not fit: CUDA out of memory. Tried to allocate")
    assert "MiB left for activations; the largest layer is 2 with 9.1 KiB" in said
    assert 'activations fill the memory: remedies=("amp", "checkpointing") in buoy.Run or the guard' in said


def test_what_is_switched_on_already_is_not_advised() -> None:
    said = refused(convolutions(), IMAGES, 1 << 20, remedies=("checkpointing",))

    assert 'remedies=("amp",) in buoy.Run or the guard' in said


def test_the_model_owns_the_memory() -> None:
    said = refused(wide(), ROWS, 1 << 20)

    assert "parameters 4.0 MiB, gradients 4.0 MiB, optimizer state 8.0 MiB" in said
    assert "parameters, gradients and the optimizer's state fill the memory: SGD or Adafactor" in said


def test_something_beside_the_training_owns_the_memory() -> None:
    said = refused(wide(), ROWS, 1 << 20, beside=16 << 20)

    assert "the batch and other tensors 64.0 MiB" in said
    assert "tensors outside this training fill the memory" in said
