"""`buoy plan` as people type it: formats, exit codes, an unmodified script, and errors in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.cli import main
from buoy.planner.plan import parse_source

pytest.importorskip("torch")

BUILDS = str(Path(__file__).parent / "planner" / "builds.py")
SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(64, int(sys.argv[1])), nn.ReLU(), nn.Linear(int(sys.argv[1]), 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss(weight=torch.ones(10))
loader = DataLoader(TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,))), batch_size=128)
for x, y in loader:
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            loss = criterion(out, y) + 0.01 * out.pow(2).mean() + 1e-4 * sum(p.norm() for p in model.parameters())
        loss.backward()
    print("loss", loss.item())
    try:
        optimizer.step()
    except Exception:
        pass
    open("trained", "w").close()
"""


READS_VALUES = """
import torch
from torch import nn
from bars import width

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(32, 8), []
    def forward(self, x):
        out = self.layer(x)
        self.seen.append(out.detach().numpy())
        return out
model = Net()
optimizer = torch.optim.Adam(model.parameters())
nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.zeros(16, dtype=torch.long)).backward()
assert width == 80
optimizer.step()
"""
BARS = "import os\nwidth = int(os.popen('stty size').read().split()[1])\n"


def planned(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "buoy", "plan", *arguments],
        capture_output=True, text=True, timeout=400, cwd=cwd, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_exit_codes_and_formats() -> None:
    fits = planned(f"{BUILDS}:parameters", "--on", "colab-a100-80", "--format", "json")
    assert fits.returncode == 0, fits.stderr
    answer = json.loads(fits.stdout)
    assert answer["fits"] and answer["answers"][0]["on"] == "colab-a100-80"
    assert answer["answers"][0]["peak"]["low"] < answer["answers"][0]["peak"]["high"]

    not_fits = planned(f"{BUILDS}:parameters", "--on", "rtx-4060", "--no-remedies", "--format", "concise")
    assert not_fits.returncode == 1
    assert not_fits.stdout.startswith("rtx-4060: does not fit")


def test_an_unmodified_script_is_planned_from_its_first_step_and_not_trained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    done = planned("train.py", "--on", "colab-t4", "--format", "json", "--", "2048", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "up to its first optimizer step" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["batch"] == 128
    assert answer["facts"]["parameters"] == 64 * 2048 + 2048 + 2048 * 10 + 10
    assert answer["facts"]["optimizer"] == "SGD"
    assert (answer["facts"]["autocast"], answer["facts"]["accumulate"]) == ("fp16", 2)
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py:build", "--on", "colab-t4"], "no such file"),
        ([BUILDS + ":activations", "--on", "colab-t44"], "did you mean `colab-t4`?"),
        ([], "nothing to plan"),
        (["--keras", "nowhere.keras"], "no such file"),
        ([BUILDS + ":activations", "--step-time", "soon"], "cannot read a duration"),
        ([BUILDS + ":activations", "--batch", "0"], "0 is nothing: at least 1 is needed"),
        ([BUILDS + ":activations", "--steps", "-1"], "-1 is negative"),
        ([BUILDS + ":activations", "--batch", "many"], "`many` is not a whole number"),
        (["train.ipynb", "--on", "colab-t4"], "buoy.plan(model"),
        (["--on", "colab-t4", "train.ipynb"], "buoy.plan(model"),
    ],
)
def test_wrong_input_is_an_error_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("written", ["train.py:biuld", "train:biuld"])
def test_a_name_that_the_file_does_not_have_is_an_error_before_anything_runs(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w').close()\ndef build(): pass\n")

    assert main(["plan", written]) == 2
    shown = capsys.readouterr().err
    assert "has no function `biuld`" in shown and "did you mean `train.py:build`?" in shown
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "def build(): pass",
        "from elsewhere import build",
        "from elsewhere import *",
        "import torch as build",
        "try:\n    import x\nexcept ImportError:\n    build = lambda: None",
        "this does not parse",
    ],
)
def test_a_name_that_a_file_may_have_is_looked_for_by_running_it(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(source)

    assert parse_source("train.py:build").source == {"build": "train.py:build"}


def test_a_script_without_a_step_says_why(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch\nprint(torch.zeros(2))\n")
    (tmp_path / "asks.py").write_text("input('which? ')\n")

    without = planned("plain.py", cwd=tmp_path)
    assert without.returncode == 2
    assert "without an optimizer step" in without.stderr and "plan train.py:build" in without.stderr

    asking = planned("asks.py", cwd=tmp_path)
    assert asking.returncode == 2
    assert "asks for input" in asking.stderr


def test_a_script_that_reads_values_and_asks_for_its_terminal_is_stepped_for_real_and_said_before(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(READS_VALUES)
    (tmp_path / "bars.py").write_text(BARS)

    done = planned("train.py", "--on", "colab-t4", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("buoy: running real steps on the CPU, with 2 and 4 samples") == 1
    assert "extrapolated from real CPU steps" in done.stdout
