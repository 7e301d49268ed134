"""`buoy plan train.py`: an unmodified script is run up to its first step in a child that touches no run folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.estimate.child import EstimateError
from tests.planner.keras_scripts import FIT, LOOP, OWN_STEP

torch = pytest.importorskip("torch")

from buoy.torch.plan import script as first_step  # noqa: E402
from buoy.torch.plan.gpu import without_gpu  # noqa: E402

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
"""

# As people write it: transforms that are modules, a causal mask, a GPU by its number, clipping, and a loose weight.
LANGUAGE = """
import torch
from torch import nn
class Normalize(nn.Module):
    def forward(self, x):
        return x - 1 if (x > 5).any() else x
normalize = Normalize()
loader = torch.utils.data.DataLoader([normalize(torch.zeros(20)) for _ in range(64)], batch_size=16)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.words, self.body = nn.Embedding(100, 32), nn.TransformerEncoder(layer, 2)
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x.device)
        return self.body(self.words(x), mask=mask)
model, head = Model().to(0), nn.Parameter(torch.zeros(32, 100))
optimizer = torch.optim.AdamW([*model.parameters(), head])
for batch in loader:
    x = batch.long().to(0)
    loss = nn.functional.cross_entropy(torch.matmul(model(x), head).flatten(0, 1), x.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
"""


# As Lightning and LBFGS do it.
CLOSURE = """
import torch
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).pow(2).mean()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
"""

# A large generator and a small discriminator that steps first, and a moving average; it
# computes with two threads, which would be missing in the traces that are forked off after it.
TURNS = """
import copy, torch
from torch import nn
torch.set_num_threads(2)
G = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4096))
D, average = nn.Linear(4096, 1), copy.deepcopy(G)
of_g, of_d = (torch.optim.Adam(module.parameters()) for module in (G, D))
loss, ones = nn.BCEWithLogitsLoss(), torch.ones(32, 1)
for step in range(1000):
    x, z = torch.randn(32, 4096), torch.randn(32, 16)
    of_d.zero_grad()
    made = G(z)
    with torch.autocast("cuda", dtype=torch.float16):
        real = loss(D(x), ones)
    real.backward()
    loss(D(made.detach()), 0 * ones).backward()
    of_d.step()
    for p in D.parameters():
        p.data.clamp_(-0.1, 0.1)
    of_g.zero_grad()
    if step % 2:
        loss(D(made), ones).backward()
        of_g.step()
"""


# The second optimizer is for a later phase.
LATER = """
import torch
model, late = torch.nn.Linear(64, 10), torch.nn.Linear(8, 8)
optimizer, of_late = torch.optim.AdamW(model.parameters()), torch.optim.SGD(late.parameters(), lr=0.1)
for step in range(STEPS):
    model(torch.randn(32, 64)).pow(2).mean().backward()
    optimizer.step()
"""


def planned(script: str, folder: Path, *more: str) -> tuple[dict[str, object], str]:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "buoy", "plan", "train.py", "--on", "colab-t4", "--format", "json", *more],
        capture_output=True, text=True, timeout=400, cwd=folder, stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
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


def test_a_script_that_updates_its_weights_itself_is_asked_for_a_build_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(OWN_UPDATE)

    with pytest.raises(EstimateError, match="without an optimizer step on a loss") as refused:
        first_step.run(str(script), [], 60.0)

    assert "buoy plan train.py:build" in str(refused.value)


def test_a_loop_as_people_write_it_is_planned_with_its_own_optimizer(tmp_path: Path) -> None:
    answer, _ = planned(LANGUAGE, tmp_path)

    assert answer["batch"] == 16 and answer["facts"]["optimizer"] == "AdamW"  # type: ignore[index]
    assert answer["facts"]["engine"] == "fake"  # type: ignore[index]
    assert answer["answers"][0]["parts"]["optimizer"] > 8 * 3200  # type: ignore[index]
    assert left_behind(tmp_path) == []


def test_every_optimizer_of_a_script_is_counted_and_what_it_holds_beside_its_step(tmp_path: Path) -> None:
    answer, _ = planned(TURNS, tmp_path, "--no-remedies")

    g, d = 17 * 256 + 257 * 4096, 4097
    parts = answer["answers"][0]["parts"]  # type: ignore[index]
    assert 8 * (g + d) <= parts["optimizer"] < 8.01 * (g + d)
    assert 4 * (2 * g + d) <= parts["weights"] < 4.01 * (2 * g + d)
    assert parts["gradients"] >= 4 * g
    assert answer["batch"] == 32
    assert "other than the step's own" in " ".join(answer["notes"])  # type: ignore[arg-type]


READS_GRADIENTS = """
import torch
made, judge = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
its, hers = torch.optim.Adam(made.parameters()), torch.optim.Adam(judge.parameters())
for step in range(100):
    hers.zero_grad()
    judge(torch.randn(16, 8)).mean().backward()
    hers.step()
    norm = sum(p.grad.norm() for p in judge.parameters())
    if step % 20 == 19:
        its.zero_grad()
        judge(made(torch.randn(16, 8))).mean().backward()
        its.step()
"""


def test_a_script_that_reads_gradients_while_it_is_followed_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed after the step that is planned: the missing optimizer is what is wrong."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(READS_GRADIENTS)

    with pytest.raises(EstimateError, match="not seen to step"):
        first_step.run(str(script), [], 60.0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_script_with_an_optimizer_that_does_not_step_is_asked_for_a_build_function(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(LATER.replace("STEPS", "3" if ends else "1000"))

    with pytest.raises(EstimateError, match="not seen to step") as refused:
        first_step.run(str(script), [], 60.0)

    assert "SGD" in str(refused.value) and "buoy plan train.py:build" in str(refused.value)


def test_a_loss_made_in_the_steps_own_closure_is_that_optimizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(CLOSURE)

    found = first_step.run(str(script), [], 60.0)

    assert found == {"accumulate": 1, "autocast": None}
    assert type(first_step.build()["optimizer"]) is torch.optim.AdamW
    assert left_behind(tmp_path) == []


def test_a_script_that_trains_in_other_processes_is_refused_before_they_start(tmp_path: Path) -> None:
    trained = tmp_path / "trained"

    with without_gpu(), pytest.raises(EstimateError, match="processes of its own"):
        multiprocessing.Process(target=trained.touch).start()

    loader = torch.utils.data.DataLoader(range(4), num_workers=1)
    with without_gpu():
        assert len(list(loader)) == 4, "the workers that make data may start"
    assert not trained.exists()


@pytest.mark.parametrize("kind", ["fit", "own step", "function"])
def test_a_keras_script_is_planned_from_its_first_step_and_not_trained(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    script = {"fit": FIT, "own step": OWN_STEP, "function": LOOP.replace("FUNCTION", "@tf.function")}[kind]

    answer, said = planned(script, tmp_path)

    assert "up to its first optimizer step" in said
    assert answer["batch"] == 32 and answer["facts"]["parameters"] == PARAMETERS  # type: ignore[index]
    assert answer["facts"]["optimizer"] == "Adam"  # type: ignore[index]
    moments = answer["answers"][0]["parts"]["optimizer"]  # type: ignore[index]
    assert 8 * PARAMETERS <= moments < 8 * PARAMETERS + 100
    assert answer["answers"][0]["largest_batch"]  # type: ignore[index]
    assert left_behind(tmp_path) == []


def test_a_keras_loop_that_runs_operation_by_operation_is_asked_for_a_function(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "train.py").write_text(LOOP.replace("FUNCTION", ""))

    done = subprocess.run(
        [sys.executable, "-m", "buoy", "plan", "train.py", "--on", "colab-t4"],
        capture_output=True, text=True, timeout=400, cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip

    assert done.returncode == 2
    assert "operation by operation" in done.stderr and "@tf.function" in done.stderr
    assert left_behind(tmp_path) == []
