"""`buoy.keras.Guard` and `Loop`: killed with SIGKILL, run again, every bit as in the run that was never killed."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint.store import Store

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

# kind -> the steps after which it is killed, one attempt each (step 14 is the last of the second epoch)
KILLS = {
    "arrays": [5, 14],
    "arrays-batch": [8],
    "arrays-steps": [9],
    "pipeline": [5, 14],
    "pipeline-repeat": [11],
    "pipeline-random": [11],
    "pipeline-unknown": [10],
    "pydataset": [13],
    "pydataset-threads": [11],
    "pydataset-processes": [11],
    "generator": [11],
    "loader": [11],
    "mixed": [11],
    "mirrored": [11],
    "loop": [11],
}
BEHAVIOURS = [
    node.name
    for node in ast.parse((HERE / "behaviours.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.args] == ["folder"]
]

Live = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Lives a life in a process of its own; all of them share one start of TensorFlow."""
    nursery = subprocess.Popen(
        [sys.executable, "-m", "tests.keras.nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert nursery.stdin is not None and nursery.stdout is not None
    asked, answered = nursery.stdin, nursery.stdout

    def ask(*request: Any) -> dict[str, Any]:
        asked.write(json.dumps([str(each) if isinstance(each, Path) else each for each in request]) + "\n")
        asked.flush()
        return dict(json.loads(answered.readline()))

    yield ask
    asked.close()
    nursery.wait(30)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{folder}.log").read_text().splitlines()]


@pytest.mark.parametrize("kind", KILLS)
def test_a_killed_training_goes_on_bit_for_bit(live: Live, tmp_path: Path, kind: str) -> None:
    """Every variable after every step, every loss, the history and the final state."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert live("training", whole, kind)["status"] == 0
    for step in KILLS[kind]:
        assert live("training", killed, kind, step)["status"] == signal.SIGKILL
    last = live("training", killed, kind)
    expected, found = lines(whole), lines(killed)
    steps = {line["step"]: line for line in expected if "step" in line}

    assert last["status"] == 0, last["said"]
    assert "after step" in last["said"] or kind == "loop"
    assert [line for line in found if "step" in line and line != steps[line["step"]]] == []
    assert found[-1] == expected[-1]
    repeated = len(found) - len(expected)
    assert repeated <= 3 * len(KILLS[kind]), "a checkpoint every three steps: no more is made twice"


def test_sigterm_saves_the_step_that_is_done_and_ends_as_sigterm_does(live: Live, tmp_path: Path) -> None:
    ended = live("training", tmp_path / "run", "arrays", 4, signal.SIGTERM)
    newest = Store(tmp_path / "run").newest(print)

    assert os.WTERMSIG(ended["status"]) == signal.SIGTERM, ended["said"]
    assert newest is not None and newest.step == 4 and newest.about["reason"] == "sigterm"


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(live: Live, tmp_path: Path, name: str) -> None:
    lived = live("behaviours", name, tmp_path / "run")

    assert lived["status"] == 0, lived["said"]


def test_the_guard_is_reached_from_buoy_alone_and_loads_keras_only_then() -> None:
    code = "import sys, buoy; print(buoy.keras.__all__, {'keras', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split("\n")[0] == "['Guard', 'Loop'] set()"
