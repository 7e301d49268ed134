"""`buoy.keras.Guard` and `Loop`: killed with SIGKILL, run again, every bit as in the run that was never killed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.checkpoint.store import Store
from tests.keras.trial import KILLS, Live, differences

BEHAVIOURS = [
    (module, node.name)
    for module in ("behaviours", "data_behaviours", "beside_behaviours")
    for node in ast.parse((Path(__file__).parent / f"{module}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and ast.unparse(node.args) == "folder: str"
]


QUICK = ("arrays", "generator", "loop")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KILLS]
)
def test_a_killed_training_goes_on_bit_for_bit(live: Live, tmp_path: Path, kind: str) -> None:
    assert differences(live, tmp_path, kind, KILLS[kind]) == []


def test_sigterm_saves_the_step_that_is_done_and_ends_as_sigterm_does(live: Live, tmp_path: Path) -> None:
    ended = live("training", tmp_path / "run", "arrays", 4, signal.SIGTERM)
    newest = Store(tmp_path / "run").newest(print)

    assert os.WTERMSIG(ended["status"]) == signal.SIGTERM, ended["said"]
    assert newest is not None and newest.step == 4 and newest.about["reason"] == "sigterm"


SEVERAL_TRAININGS = (
    "a_pydataset_may_make_its_generator_late_and_augment_some_batches",
    "a_pydataset_that_shuffles_in_place_goes_on_in_rounds",
    "a_pydataset_to_validate_on_may_draw",
    "a_second_training_over_the_same_pipeline_goes_on_in_its_order",
    "a_second_training_over_the_same_pydataset_goes_on_in_its_order",
    "a_second_training_validates_on_the_same_set_in_its_order",
    "a_shuffled_set_to_validate_on_goes_on_in_rounds",
    "generators_in_the_pipeline_to_validate_on_go_on_and_what_cannot_is_told",
    "threads_may_share_a_generator_of_the_pydataset",
)
"""Each trains several times."""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=pytest.mark.slow if name in SEVERAL_TRAININGS else ())
        for module, name in BEHAVIOURS
    ],
)
def test_behaviour(live: Live, tmp_path: Path, module: str, name: str) -> None:
    lived = live(module, name, tmp_path / "run")

    assert lived["status"] == 0, lived["said"]


def test_the_guard_is_reached_from_buoy_alone_and_keras_is_not_loaded_for_it() -> None:
    code = "import sys, buoy; print('Guard' in dir(buoy.keras), {'keras', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "True set()"
