"""buoy.testing, as somebody else's project would use it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from buoy.testing import byte_budget, every_allocation


def test_a_budget_counts_what_is_live_and_raises_what_cuda_raises() -> None:
    with byte_budget("1MiB") as budget:
        kept = torch.zeros(128, 1024)
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 0\.75 MiB"):
            torch.zeros(192, 1024)
        assert budget.live == kept.untyped_storage().nbytes()
        del kept
        torch.zeros(192, 1024)

    assert budget.failures == 1
    assert budget.peak == 192 * 1024 * 4


def test_a_budget_fails_at_the_same_operation_every_time() -> None:
    def failing() -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        x = torch.randn(100, 64)
        with byte_budget("90KiB"), pytest.raises(torch.OutOfMemoryError) as caught:
            model(x).sum().backward()
        return str(caught.value)

    assert failing() == failing()


def test_inputs_and_weights_count_as_soon_as_they_are_used() -> None:
    weight = torch.zeros(1024)
    with byte_budget("1MiB") as budget:
        torch.add(weight, 1)

    assert budget.peak == 2 * 4096


def test_every_allocation_visits_each_one_and_hands_over_what_became_of_it() -> None:
    def careful(weights: list[torch.Tensor]) -> str:
        try:
            weights.append(weights[0] @ weights[0])
        except torch.OutOfMemoryError:
            return "survived"
        weights.append(weights[0] * 2)
        return "done"

    failures = list(every_allocation(careful, lambda: [torch.ones(8, 8)]))

    assert [failure.operation for failure in failures] == ["aten.mm.default", "aten.mul.Tensor"]
    assert [failure.result for failure in failures] == ["survived", None]
    assert isinstance(failures[1].error, torch.OutOfMemoryError)
    assert [len(failure.subject) for failure in failures] == [1, 2]


def test_work_that_is_not_the_same_each_time_is_found_out() -> None:
    turns = iter(range(100))

    def fickle(_: None) -> None:
        if next(turns) == 0:
            torch.ones(8) * 2

    with pytest.raises(AssertionError, match="differs from run to run"):
        list(every_allocation(fickle))


def test_the_examples_in_the_kit_run() -> None:
    code = (
        "import doctest, importlib, sys\n"
        "names = ['buoy.testing', 'buoy.testing.budget', 'buoy.testing.every_allocation']\n"
        "sys.exit(sum(doctest.testmod(importlib.import_module(name)).failed for name in names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False
    )

    assert done.returncode == 0, done.stdout
