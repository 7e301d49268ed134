"""A death under `buoy run` is judged once, by the sidecar; `buoy run` reads what it found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import buoy
from tests.processes import attempt, read

COUNTING = """

_judge = judge


def judge(evidence):
    with open({file!r}, "a") as file:
        file.write(str(os.getpid()) + "\\n")
    return _judge(evidence)
"""


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """A copy of buoy that writes down each process that judges: the sidecar hears of no environment variable."""
    copy = tmp_path / "src" / "buoy"
    shutil.copytree(Path(buoy.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "verdict" / "judge.py").open("a") as file:
        file.write(COUNTING.format(file=str(tmp_path / "judged")))
    return tmp_path


def run(place: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "buoy", "run", "--run", str(place / "run"), *options, "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(place / "src")},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code"),
    [((), "raise ValueError('bad value')"), (("--restart", "1"), "import os; os.kill(os.getpid(), 9)")],
)
def test_a_death_is_judged_once_and_by_the_sidecar(
    counting: Path, options: tuple[str, ...], code: str
) -> None:
    done = run(counting, code, *options)
    judges = (counting / "judged").read_text().split()
    lives = list((counting / "run" / "attempts").iterdir())

    assert done.returncode in (1, 137)
    assert len(judges) == len(lives) == len(set(judges))
    assert "run #1: " in done.stderr
    assert read(attempt(counting / "run") / "verdict.json")["cause"]["id"] in done.stderr


def test_without_a_sidecar_it_is_judged_all_the_same(counting: Path) -> None:
    (counting / "src" / "buoy" / "supervisor" / "sidecar.py").write_text("raise SystemExit(1)\n")
    done = run(counting, "raise ValueError('bad value')")

    assert "python-exception" in done.stderr
    assert len((counting / "judged").read_text().split()) == 1
