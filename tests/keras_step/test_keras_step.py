"""The Keras step as a transaction: see checks.py, refusals.py and kinds.py for what each name means."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from buoy.testing import shim
from tests.processes import Answers, answers

ROOT = Path(__file__).parents[2]


def names() -> list[str]:
    sources = [
        (Path(__file__).parent / name).read_text() for name in ("checks.py", "refusals.py", "kinds.py")
    ]
    functions = [one for source in sources for one in ast.parse(source).body]
    return [one.name for one in functions if isinstance(one, ast.FunctionDef) and one.decorator_list]


@pytest.fixture(scope="module")
def results() -> Iterator[Answers]:
    """One process for all of them: TensorFlow takes seconds to start."""
    questions = {name: name for name in names()}
    with answers(questions, "tests.keras_step.checks", env=shim.environment()) as each:
        yield each


@pytest.mark.parametrize("name", names())
def test_keras_step(name: str, results: Answers) -> None:
    assert results[name] is None, results[name]


@pytest.mark.skipif(find_spec("torch") is None, reason="Keras starts on no backend that is not installed")
def test_on_the_torch_backend_it_says_that_it_does_not_work() -> None:
    code = """
import keras
from buoy.keras.step.transaction import install
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    install(model, say=print, event=print)
except Exception as error:
    print(type(error).__name__, error)
import buoy
for use in (
    lambda: buoy.keras.gradients(model, lambda batch: 0.0),
    lambda: model.fit([[1.0, 2.0]], [[1.0]], callbacks=[buoy.keras.Guard("never")]),
):
    try:
        use()
    except buoy.BuoyError as error:
        print(error)
"""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=400
    )

    assert "CannotSplit" in done.stdout, done.stderr[-2000:]
    assert done.stdout.count("received: the torch backend") == 3, done.stdout + done.stderr[-2000:]
    assert "buoy.Run().backward" in done.stdout and "buoy.keras.Guard resumes" in done.stdout
    assert not Path("never").exists()
