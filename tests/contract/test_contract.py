"""What holds in PyTorch and in Keras alike: each test runs for both from this file.

The sentences of one are those of the other: who knows what buoy says in PyTorch knows what it says in Keras.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buoy.microbatch.exactness import Backend
from buoy.testing import shim
from tests.processes import Server

pytest.importorskip("torch")
pytest.importorskip("tensorflow")

FRAMEWORKS = ["torch", "keras"]
SOURCE = Path(__file__).parents[2] / "src" / "buoy"
TRAINING = Path(__file__).parents[1] / "earlier_runs" / "training.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """One process a framework."""
    made = {
        "torch": Server("tests.contract.steps", "torch"),
        "keras": Server("tests.contract.steps", "keras", env=shim.environment()),
    }
    yield made
    for server in made.values():
        server.stop()


def without_numbers(lines: list[str]) -> list[str]:
    """Sizes are the device's: how much a framework takes for a sample differs."""
    return list(dict.fromkeys(re.sub(r"\d+(\.\d+)?", "N", line) for line in lines))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_that_does_not_fit_is_retried_in_micro_batches_with_the_same_gradient(
    framework: str, servers: dict[str, Server]
) -> None:
    whole = servers[framework].ask(["plain", None])
    short = servers[framework].ask(["plain", 2 * MIB])

    assert whole["said"] == [] and whole["error"] == {}
    assert without_numbers(short["said"]) == [
        "out of memory with N samples; retrying the step in micro-batches of N"
    ]
    assert {"batch: samples step", "retry: samples smaller step what"} <= {
        re.sub(r" error\b", "", event) for event in short["events"]
    }
    assert short["gradient"] == pytest.approx(whole["gradient"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", ["batchnorm", "contrastive"])
def test_what_depends_on_the_other_samples_is_refused_with_the_same_sentences(
    kind: str, servers: dict[str, Server]
) -> None:
    errors = {name: servers[name].ask([kind, 2 * MIB])["error"] for name in FRAMEWORKS}

    assert {error["type"] for error in errors.values()} == {"CannotSplit"}
    assert len({error["message"] for error in errors.values()}) == 1, errors
    assert len({error["expected"] for error in errors.values()}) == 1, errors
    assert all(error["hint"] for error in errors.values())


def run(framework: str, folder: Path, *more: str) -> tuple[int, list[float], list[str]]:
    """One life of a training of 24 steps that saves every second one: exit code, losses, what buoy said."""
    losses = folder.with_suffix(".txt")
    losses.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(TRAINING), str(folder), framework, str(losses), *more],
        capture_output=True, text=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("buoy: ")]
    text = losses.read_text() if losses.exists() else ""  # nothing was trained
    return done.returncode, [float(line) for line in text.splitlines()], said


@pytest.fixture(scope="module", params=FRAMEWORKS)
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Undisturbed; killed at step 13 and resumed; told to stop at step 7 and resumed."""
    where, framework = tmp_path_factory.mktemp(request.param), request.param
    return {
        "whole": run(framework, where / "whole"),
        "killed": run(framework, where / "killed", "13"),
        "after the kill": run(framework, where / "killed"),
        "stopped": run(framework, where / "stopped", "7", str(int(signal.SIGTERM))),
        "after the stop": run(framework, where / "stopped"),
        "once more": run(framework, where / "stopped"),
    }


def test_a_killed_training_resumes_bit_for_bit_and_says_from_where(lives: dict[str, Any]) -> None:
    (code, losses, said), (_, whole, _) = lives["after the kill"], lives["whole"]

    assert lives["killed"][0] == -signal.SIGKILL and code == 0
    assert losses == whole[12:]
    assert re.sub(r" \(.*", "", said[0]) == "buoy: resumed from step 12"


def test_sigterm_saves_the_step_says_so_and_ends_the_process_as_it_would_have(lives: dict[str, Any]) -> None:
    code, _, said = lives["stopped"]

    assert code == -signal.SIGTERM
    assert "buoy: received SIGTERM: saving a checkpoint after this step" in said
    assert re.sub(r" \(.*", "", lives["after the stop"][2][0]) == "buoy: resumed from step 7"
    assert lives["after the stop"][1] == lives["whole"][1][7:]


def test_a_finished_training_trains_nothing_more_and_says_so(lives: dict[str, Any]) -> None:
    code, losses, said = lives["once more"]

    assert (code, losses) == (0, [])
    assert any("finished" in line or "complete" in line for line in said), said


def test_run_and_every_guard_take_the_same_options() -> None:
    import buoy
    import buoy.keras

    loop, guard = (
        {name: parameter.default for name, parameter in inspect.signature(made.__init__).parameters.items()}
        for made in (buoy.Run, buoy.keras.Guard)
    )

    only_torch = {"remedies"}  # switches of PyTorch
    assert set(loop) - set(guard) == only_torch and set(guard) <= set(loop)
    assert {name: guard[name] for name in guard if name != "folder"} == {
        name: loop[name] for name in guard if name != "folder"
    }


@pytest.mark.parametrize(
    "backend", ["buoy.torch.exactness.probe:FewSamples", "buoy.keras.exactness.probe:KerasBackend"]
)
def test_a_backend_of_the_ladder_has_what_the_protocol_says(backend: str) -> None:
    module, _, name = backend.partition(":")
    code = (
        "import os, sys, inspect; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        f"from {module} import {name} as made\n"
        "from buoy.microbatch.exactness import Backend\n"
        "for each in [n for n in vars(Backend) if not n.startswith('_')]:\n"
        "    asked, given = vars(Backend)[each], getattr(made, each, None)\n"
        "    if callable(asked):\n"
        "        inside = list(inspect.signature(asked).parameters)[1:]\n"
        "        print(each, len(inside) == len(inspect.signature(given).parameters) - 1)\n"
        "    else:\n"
        "        source = inspect.getsource(made)\n"
        "        print(each, given is not None or f'self.{each}' in source)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    answers = dict(line.split() for line in done.stdout.splitlines())
    assert set(answers) == {name for name in vars(Backend) if not name.startswith("_")}
    assert set(answers.values()) == {"True"}, answers


def test_the_same_job_has_the_same_file_name() -> None:
    """docs/architecture.md promises it: cover one framework and guess the other."""
    same = {
        "step": {"transaction", "gradient", "snapshot", "sizes"},
        "exactness": {"probe", "samples", "randomness", "rounding"},
        "state": {"state_dict", "tensors"},
        "data": {"loader", "replay", "rng"},
        "memory": {"device", "holders"},
    }
    for room, names in same.items():
        for framework in FRAMEWORKS:
            found = {path.stem for path in (SOURCE / framework / room).glob("*.py")}
            assert names <= found, f"{framework}/{room} lacks {names - found}"
