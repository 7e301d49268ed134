"""`buoy plan train.py`: an unmodified script is run up to its first step in a child that touches no run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.keras_scripts import FIT, LOOP

pytest.importorskip("torch")

PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10

TORCH = """
import torch, buoy
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to("cuda")
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(96, 64), torch.zeros(96, dtype=torch.long)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32)
run = buoy.Run("runs/torch", save=1, mirror="mirror")
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(1):
    for a, b in run.batches(loader):
        a, b = a.cuda(), b.to("cuda:0", non_blocking=True)
        loss = run.backward((a, b), lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1]).mul_(1.0))
        optimizer.step()
"""

OWN_UPDATE = """
import torch
model = torch.nn.Linear(64, 10)
for _ in range(3):
    torch.nn.functional.mse_loss(model(torch.randn(32, 64)), torch.zeros(32, 10)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
    open("trained", "w").close()
"""


def planned(script: str, folder: Path, *more: str) -> tuple[dict[str, object], str]:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "buoy", "plan", "train.py", "--on", "colab-t4", "--format", "json", *more],
        capture_output=True, text=True, timeout=200, cwd=folder, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("train.py", "__pycache__"))


def test_a_run_on_a_gpu_is_planned_here_and_its_folder_is_not_touched(tmp_path: Path) -> None:
    answer, _ = planned(TORCH, tmp_path)

    assert answer["batch"] == 32 and answer["facts"]["parameters"] == PARAMETERS  # type: ignore[index]
    assert any("compiled" in note for note in answer["notes"])  # type: ignore[attr-defined]
    assert left_behind(tmp_path) == []


def test_a_script_that_updates_its_weights_itself_has_no_optimizer(tmp_path: Path) -> None:
    answer, said = planned(OWN_UPDATE, tmp_path)

    assert "changes its weights itself" in said
    assert answer["answers"][0]["parts"]["optimizer"] == 0  # type: ignore[index]
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("kind", ["fit", "function", "op by op"])
def test_a_keras_script_is_planned_from_its_first_step_and_not_trained(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    script = FIT if kind == "fit" else LOOP.replace("FUNCTION", "@tf.function" if kind == "function" else "")

    answer, said = planned(script, tmp_path)

    assert "up to its first optimizer step" in said
    assert answer["batch"] == 32 and answer["facts"]["parameters"] == PARAMETERS  # type: ignore[index]
    assert answer["facts"]["optimizer"] == "Adam"  # type: ignore[index]
    first = answer["answers"][0]  # type: ignore[index]
    assert (first["largest_batch"] is None) == (kind == "op by op")
    assert any("operation by operation" in note for note in answer["notes"]) == (kind == "op by op")  # type: ignore[attr-defined]
    assert left_behind(tmp_path) == []
