"""What a run tells of its batches, for the plan to be compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def test_the_largest_batch_so_far_is_told_with_the_run_it_is_of(tmp_path: Path) -> None:
    """Not each batch: an epoch's last one is smaller, every time."""
    from buoy.training.micro_batches import MicroBatches

    told: list[tuple[str, dict[str, Any]]] = []

    def event(kind: str, **values: Any) -> None:
        told.append((kind, values))

    model = torch.nn.Linear(4, 1)
    micro = MicroBatches(str(tmp_path), None, {"say": lambda text: None, "event": event})
    micro.track(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for samples in (8, 8, 3, 8, 16, 3):
        micro.backward(torch.randn(samples, 4), lambda part: model(part).square().mean())

    batches = [values for kind, values in told if kind == "batch"]
    assert [(each["step"], each["samples"]) for each in batches] == [(0, 8), (4, 16)]
    assert {each["path"] for each in batches} == {str(tmp_path)}
