"""Run folders that the first version (64255b3) left behind resume and are read as before.

The two archives were made by `earlier_runs/training.py` with that version, killed with SIGKILL at step 13.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "earlier_runs"
STEPS, SAVED = 24, 12


def losses(folder: Path, framework: str) -> list[float]:
    """Of one life of the training, to its end."""
    to = folder.with_suffix(".txt")
    done = subprocess.run(
        [sys.executable, str(HERE / "training.py"), str(folder), framework, str(to)],
        capture_output=True, text=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(line) for line in to.read_text().splitlines()]


def unpacked(framework: str, where: Path) -> Path:
    with tarfile.open(HERE / f"{framework}-64255b3.tar.gz") as archive:
        archive.extractall(where, filter="data")
    return where / framework


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_training_of_the_first_version_resumes_where_it_was(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("torch" if framework == "torch" else "tensorflow")
    undisturbed = losses(tmp_path / "whole", framework)
    resumed = losses(unpacked(framework, tmp_path), framework)

    assert len(undisturbed) == STEPS
    # Another processor may round otherwise; on the one where the archive was made these are equal.
    assert resumed == pytest.approx(undisturbed[SAVED:], rel=1e-4)


@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize(
    "words", [["why"], ["runs"], ["top", "--once"], ["report"], ["ckpt", "list"], ["ckpt", "verify"]]
)
def test_what_reads_a_run_reads_one_of_the_first_version(
    framework: str, words: list[str], tmp_path: Path
) -> None:
    folder = unpacked(framework, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "buoy", *words, str(folder)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0 and "error" not in done.stderr.lower(), done.stderr
    assert (done.stdout + done.stderr).strip()
