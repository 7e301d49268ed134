"""What is damaged: run folders, checkpoints and a mirror of real short trainings, and notebooks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ENDS = ("finish", "raise", "kill")

TRAINING = """\
import os, signal, sys, time
import torch
import buoy

end, folder, mirror = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
history = {"losses": [], "seen": {1, 2}, "name": "cats", "best": float("inf"), "last": (1, 2)}
run = buoy.Run(folder, mirror=mirror)
run.track(model=model, optimizer=optimizer, history=history)
data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(10)]
for epoch in run.epochs(4):
    for number, batch in enumerate(run.batches(data)):
        loss = run.backward(batch, lambda part: torch.nn.functional.mse_loss(model(part[0]), part[1]))
        optimizer.step()
        optimizer.zero_grad()
        history["losses"].append(float(loss))
        time.sleep(0.07)
        if (epoch, number, end) == (3, 5, "raise"):
            raise ValueError("a bad batch")
        if (epoch, number, end) == (3, 5, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
    run.metric(val_loss=float(loss))
    run.save()
run.finish()
"""

# One of each kind that a longer training may leave: what the three above do not come to.
EVENTS: tuple[dict[str, object], ...] = (
    {"kind": "warning", "alarm": "memory", "text": "RAM is full in 3 min", "values": {"seconds": 180.0, "rss": 5}},
    {"kind": "process-death", "pid": 77, "name": "python", "status": 9, "source": "pidfd", "rss": 10 << 20,
     "counters": {"oom_kill": [0, 1]}, "kernel_log": [{"t": 3.0, "text": "Out of memory: Killed process 77 (python)"}]},
    {"kind": "parent-death", "pid": 76, "name": "bash", "status": 0, "awaited": True, "together": False},
    {"kind": "stall", "step": 3, "seconds": 300.0, "busy": False, "threads": [{"name": "python", "state": "S"}]},
    {"kind": "stacks", "pid": 77, "why": "stall"},
    {"kind": "clock", "jump": 3.5},
    {"kind": "gap", "seconds": 9.0},
    {"kind": "slowdown", "step": 9, "seconds": 1.0, "before": 0.5},
    {"kind": "retry", "what": "oom", "step": 2, "samples": 4, "smaller": 2},
    {"kind": "sized", "step": 2, "samples": 2, "of": 4},
    {"kind": "batch", "step": 2, "samples": 4, "path": "runs/cats"},
    {"kind": "remedy", "name": "amp", "blocks": 3},
    {"kind": "retention", "text": "room made for the next checkpoint: removed step 1"},
    {"kind": "not-finite", "step": 4, "kept": 3},
    {"kind": "trouble", "what": "checkpoint of step 4: no room"},
    {"kind": "time-limit", "seconds": 3600},
    {"kind": "disk", "path": "/tmp"},
    {"kind": "cell-error", "type": "builtins.ValueError", "message": "bad", "step": 5, "runs": ["."]},
    {"kind": "plan", "source": "train.py", "framework": "torch", "fits": True, "batch": 4, "micro_batch": 2,
     "cheapest": "amp", "answers": [{"on": "this", "device": "cpu", "samples": 4, "verdict": "fits",
                                     "peak": [1, 2], "host_ram": [1 << 20, 2 << 20]}]},
    {"kind": "peak", "what": "reserved", "foreseen": [1, 3], "real": 2},
    {"kind": "save", "what": "torch", "path": "model.pt", "step": 7},
    {"kind": "opened", "run": "../cats", "path": "runs/cats", "newest": 3, "counted": 2},
    {"kind": "training", "run": "../cats", "step": 3, "left": 5, "together": False},
    {"kind": "loop", "left": 5},
)  # fmt: skip


def build(folder: Path) -> None:
    """Train three times for a few seconds, and put notebooks beside."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TRAINING)
    trainings = [_start(folder, end) for end in ENDS]
    for end, training in zip(ENDS, trainings, strict=True):
        output = training.communicate(timeout=300)[0]
        assert (folder / "mirror" / end / "checkpoints").is_dir(), output
        assert (folder / "runs" / end / "attempts" / "0001" / "verdict.json").is_file(), output
    for end in ENDS:
        _enrich(folder / "runs" / end)
    (folder / "notebooks").mkdir()
    for path in sorted((Path(__file__).parents[2] / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            shutil.copy(path, folder / "notebooks" / path.name)
    for path in sorted((Path(__file__).parents[2] / "docs" / "rules").glob("*.md"))[::4]:
        shutil.copy(path, folder / "notebooks" / path.name)


def _start(folder: Path, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "train.py", end, f"runs/{end}", "mirror"]
    return subprocess.Popen(
        [sys.executable, "-m", "buoy", "run", "--run", f"runs/{end}", "--", *command],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _enrich(run: Path) -> None:
    attempt = run / "attempts" / "0001"
    sizer = {
        "limit": 9.0,
        "passed": 4.0,
        "failed": None,
        "clean": 1,
        "patience": 16,
        "trying": None,
        "fit": None,
    }
    sizes: list[dict[str, object]] = [{"samples": 2}, {"parts": [3, 1]}, {"samples": None}]
    lines = [
        json.dumps({"step": step, **size, "sizer": sizer})
        for step, size in zip((21, 31, 32), sizes, strict=True)
    ]
    (run / "micro-batches.jsonl").write_text("\n".join(lines) + "\n")
    (process,) = attempt.glob("process-*")
    (process / "cells").write_text("3 1234.py\n")
    (process / "fault.txt").write_text(
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
        '  File "train.py", line 9 in f\n'
    )


def add_events(attempt: Path, events: Sequence[dict[str, object]]) -> None:
    """Let the recorder have seen these too, shortly after the start."""
    began = json.loads((attempt / "attempt.json").read_text())
    with open(attempt / "events.jsonl", "a") as file:
        for at, event in enumerate(events):
            times = {"t": began["t"] + 1 + at / 10, "wall": began["wall"] + 1 + at / 10}
            file.write(json.dumps({**times, **event}) + "\n")
