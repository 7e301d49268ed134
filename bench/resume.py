"""Resuming late in an epoch: seconds from the process's start to its next step, at batch 50,000 and at batch 10.

Asked: at most 1.1 times as long, for map-style data. The children are bench/resume_torch.py and bench/resume_keras.py;
each trains for real up to the batch, saves and is killed; that run folder is then resumed again and again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import interval, table

BATCHES = (10, 50_000)
ROUNDS = 15
CASES = {
    "torch, no workers": ("torch", "0"),
    "torch, 2 workers": ("torch", "2"),
    "Keras, arrays": ("keras", "0"),
}


def main() -> dict[str, object]:
    shown, found, met = [], {}, True
    with tempfile.TemporaryDirectory(prefix="buoy-resume-") as folder:
        for name, (framework, workers) in CASES.items():
            for batch in BATCHES:
                code, told = _start(framework, Path(folder, f"{name}-{batch}"), batch, workers, stop_at=batch)
                if code != -signal.SIGKILL:
                    raise RuntimeError(f"the training should have been killed at {batch}:\n{told[-3000:]}")
                _until_saved(Path(folder, f"{name}-{batch}"))
            seconds: dict[int, list[float]] = {batch: [] for batch in BATCHES}
            for number in range(ROUNDS):
                for batch in BATCHES if number % 2 else reversed(BATCHES):
                    copy = Path(folder, "copy")
                    shutil.copytree(Path(folder, f"{name}-{batch}"), copy)
                    code, told = _start(framework, copy, batch, workers, stop_at=None)
                    next_batch, took = told.splitlines()[-1].split()
                    if code or int(next_batch) != batch:
                        raise RuntimeError(f"resumed at {next_batch}, not at {batch}:\n{told[-3000:]}")
                    seconds[batch].append(float(took))
                    shutil.rmtree(copy)
            early, late = (interval(seconds[batch]) for batch in BATCHES)
            ratio = interval([b / a for a, b in zip(seconds[BATCHES[0]], seconds[BATCHES[1]], strict=True)])
            met = met and ratio[0] <= 1.1
            found[name] = {"seconds": seconds, "ratio": ratio}
            shown.append(
                [
                    name,
                    f"{early[0]:.2f}",
                    f"{late[0]:.2f}",
                    f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
                ]
            )
    print(table(["data", "s at batch 10", "s at batch 50,000", "ratio"], shown))
    print(f"asked: ratio <= 1.1: {'met' if met else 'NOT met'}")
    return {"found": found, "met": met}


def _start(framework: str, folder: Path, batch: int, workers: str, *, stop_at: int | None) -> tuple[int, str]:
    """(exit code, what was printed) of one training."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BENCH_BORN": repr(time.time()),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", f"bench.resume_{framework}", str(folder), str(stop_at), workers]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
    return done.returncode, done.stdout + done.stderr if done.returncode else done.stdout


def _until_saved(folder: Path) -> None:
    """The writer goes on after the trainer's death."""
    while not list(folder.glob("checkpoints/step-*")):
        time.sleep(0.05)
