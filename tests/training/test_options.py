"""What `Run` and the guards are given is refused in words before anything is written."""

from __future__ import annotations

import importlib
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

import buoy
from buoy.errors import UsageError
from buoy.training.options import Options, folder_name


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


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        buoy.Run(tmp_path / "run", seed="a", save=0, disk="much")  # type: ignore[arg-type]

    assert refused.value.message == "3 options cannot be used"
    assert all(word in str(refused.value.received) for word in ("seed='a'", "save=0", "much"))
    assert str(refused.value.hint).count(";") >= 2


def test_run_and_guards_take_the_options_by_the_same_names_and_defaults() -> None:
    ours = {field.name: field.default for field in fields(Options)}
    parameters = list(signature(buoy.Run).parameters.values())[1:]

    assert {each.name: each.default for each in parameters} == ours
    for home in ("keras", "lightning", "transformers"):
        guard = importlib.import_module(f"buoy.{home}").Guard
        given = {each.name: each.default for each in signature(guard).parameters.values()}
        assert given.items() - {("folder", Parameter.empty)} <= ours.items()


@pytest.mark.parametrize("folder", ["", " ", 5, b"runs", "a\0b"])
def test_a_folder_that_is_none_is_refused(folder: Any) -> None:
    with pytest.raises(UsageError, match="the run folder must be a path"):
        folder_name(folder)
    with pytest.raises(UsageError, match="the run folder must be a path"):
        buoy.Run(folder)


def test_what_can_be_is_taken() -> None:
    Options(
        seed=-3,
        micro_batch=1,
        inexact="batchnorm",
        remedies="amp",
        memory_cap=1 << 30,
        mirror="x",
        disk="1GB",
    )
    Options(inexact=("batchnorm",), remedies=("amp", "checkpointing"), memory_cap="12GB")
    assert folder_name(Path("runs/cats")) == "runs/cats"
