"""Full Keras starts, killed at a random instant and run again until they are through: is every bit the same?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.keras.trial import compare, lines
from tests.kills.kind import Tally

_ROOT = Path(__file__).parents[2]
_KINDS = ("arrays", "pipeline", "pipeline-random", "pydataset", "generator", "loop")
_PER_START = 20  # of the campaign's number
_PATIENCE = 300.0


def killed_training(number: int, chance: random.Random, folder: Path) -> Tally:
    """`number // 20` deaths, each of a process that started Python, TensorFlow and the training."""
    tally = Tally()
    kind = chance.choice(_KINDS)
    for start in range(max(1, number // _PER_START)):
        if start % 5 == 0:
            kind = chance.choice(_KINDS)
            if not (folder / f"{kind}.log").exists():
                _wait(_start(folder / kind, kind))
        _one(tally, folder, kind, start, chance)
    return tally


def _one(tally: Tally, folder: Path, kind: str, start: int, chance: random.Random) -> None:
    tally.tried += 1
    run = folder / f"run-{start}"
    steps = len([line for line in lines(folder / kind) if "step" in line])
    process = _start(run, kind)
    target = chance.randrange(1, steps + 1)  # an instant after this step, wherever that finds the process
    while process.poll() is None and _made(run) < target:
        time.sleep(0.001)
    time.sleep(chance.random() * 0.05)
    process.kill()
    process.wait()
    ended = _wait(_start(run, kind))
    words = f"{kind} killed after step {target}"
    if ended:
        tally.fail("stuck", f"{words}: the next attempt ended with {ended}")
    for difference in compare(folder / kind, run, most_repeated=4):
        tally.fail("unequal", f"{words}: {difference}")


def _start(folder: Path, kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.keras.training", str(folder), kind],
        cwd=_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _made(run: Path) -> int:
    try:
        return Path(f"{run}.log").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
