"""What `Run` and the guards are given is refused in words before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import buoy
from buoy.errors import UsageError
from buoy.training.arguments import check, folder_name


@pytest.mark.parametrize(
    "given",
    [
        {"seed": "a"},
        {"seed": 1.5},
        {"seed": True},
        {"micro_batch": 0},
        {"micro_batch": "8"},
        {"inexact": ("dropout",)},
        {"inexact": 5},
        {"remedies": 5},
        {"remedies": "ampere"},
        {"plan": "colab-t4"},
        {"memory_cap": "much"},
        {"memory_cap": -1},
        {"memory_cap": 1.5},
        {"mirror": ""},
        {"mirror": 5},
        {"disk": 5},
        {"disk": "much"},
        {"save": 0},
        {"keep": "x"},
        {"time_limit": -1},
    ],
    ids=str,
)
def test_a_run_refuses_it_and_leaves_no_folder(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        buoy.Run(tmp_path / "run", **given)

    assert refused.value.hint is not None
    assert str(next(iter(given.values()))) in str(refused.value.received)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", " ", 5, b"runs", "a\0b"])
def test_a_folder_that_is_none_is_refused(folder: Any) -> None:
    with pytest.raises(UsageError, match="which folder"):
        folder_name(folder)
    with pytest.raises(UsageError, match="which folder"):
        buoy.Run(folder)


def test_what_can_be_is_taken() -> None:
    check(
        seed=-3,
        micro_batch=1,
        inexact="batchnorm",
        remedies="amp",
        memory_cap=1 << 30,
        mirror="x",
        disk="1GB",
    )
    check(inexact=["batchnorm"], remedies=("amp", "checkpointing"), memory_cap="12GB")
    assert folder_name(Path("runs/cats")) == "runs/cats"
