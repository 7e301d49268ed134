"""On macOS, on Windows and on an older Python: what works there, and one sentence about what does not.

We have neither system: `tests/elsewhere` is a stand-in that takes away what they lack.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "buoy"
NAMES = {"darwin": "macOS", "win32": "Windows"}

TRAINING = """
import torch, buoy
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
run = buoy.Run("runs/cats", save=2)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(1):
    for x, y in run.batches(torch.utils.data.DataLoader(data, batch_size=8)):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step == 7:
            raise SystemExit(3)
"""
BUILD = "import torch\ndef build():\n    return torch.nn.Linear(40, 10), torch.randn(8, 40)\n"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What somebody brought home from a training on Linux."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "train.py").write_text(TRAINING)
    (folder / "build.py").write_text(BUILD)
    done = subprocess.run(
        [sys.executable, "-m", "buoy", "run", "train.py"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    return folder


@pytest.fixture(params=sorted(NAMES))
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def python(system: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "elsewhere"), "BUOY_TEST_SYSTEM": system}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )


def buoy(system: str, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return python(system, folder, "-m", "buoy", *line.split())


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--version", 0, "buoy 0."),
        ("explain kernel-oom", 0, "What to do"),
        ("check train.py", 0, "nothing found"),
        ("why runs/cats", 0, "exit code 3"),
        ("why runs/cats --format json", 0, '"exit-code"'),
        ("report runs/cats -o -", 0, "</html>"),
        ("runs", 0, "runs/cats"),
        ("top runs/cats --once", 0, "step 7"),
        ("ckpt list runs/cats", 0, "complete"),
        ("ckpt verify runs/cats", 0, "step 7: good"),
        ("ckpt show runs/cats", 0, "weight"),
        ("ckpt export runs/cats -o weights.safetensors", 0, "wrote"),
        ("notebook status", 1, "not installed"),
        ("plan build.py:build --on colab-t4 --format concise", 0, "colab-t4: fits"),
        ("plan build.py:biuld --on colab-t4", 2, "did you mean"),
    ],
)
def test_what_only_looks_works(system: str, desk: Path, line: str, code: int, words: str) -> None:
    done = buoy(system, desk, line)

    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stdout + done.stderr


def test_checkpoints_are_brought_from_a_mirror_and_pruned(system: str, desk: Path, tmp_path: Path) -> None:
    restored = buoy(system, desk, f"ckpt restore runs/cats --to {tmp_path}/cats")
    again = buoy(system, desk, f"ckpt restore runs/cats 6 --to {tmp_path}/cats")
    pruned = buoy(system, desk, f"ckpt prune {tmp_path}/cats --keep 1 --yes")

    assert (restored.returncode, again.returncode, pruned.returncode) == (0, 0, 0), (
        restored.stderr + pruned.stderr
    )
    assert "step 7 is in" in restored.stdout and "removed 1" in pruned.stdout
    assert "step 7: good" in buoy(system, desk, f"ckpt verify {tmp_path}/cats").stdout


def test_this_machine_is_planned_for_where_its_memory_is_known(system: str, desk: Path) -> None:
    """A Mac tells how much it has; Windows tells nobody without help."""
    done = buoy(system, desk, "plan build.py:build --format concise")

    if system == "darwin":
        assert (done.returncode, done.stdout[:10]) == (0, "this: fits"), done.stderr
    else:
        assert done.returncode == 2 and "does not say how much memory it has" in done.stderr


def test_a_script_is_planned_where_a_process_can_be_forked(system: str, desk: Path) -> None:
    (desk / "script.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.randn(8, 4)).mean().backward()\noptimizer.step()\n"
    )
    done = buoy(system, desk, "plan script.py --on colab-t4 --format concise")

    if system == "darwin":
        assert (done.returncode, done.stdout[:14]) == (0, "colab-t4: fits"), done.stderr
    else:
        assert done.returncode == 2 and "an unmodified script cannot be planned on Windows" in done.stderr


@pytest.mark.parametrize(
    ("line", "code"), [("run train.py", 125), ("run -- python train.py", 125), ("demo", 2)]
)
def test_what_records_says_in_one_sentence_that_it_needs_linux(
    system: str, desk: Path, line: str, code: int
) -> None:
    done = buoy(system, desk, line)
    sentence, hint = done.stderr.splitlines()

    assert done.returncode == code
    assert sentence.startswith("error: ") and sentence.endswith(f"needs Linux, and this is {NAMES[system]}")
    assert hint.startswith("  hint: `buoy check`, `plan`, `why`, `report` and `ckpt` work here")


def test_watch_says_so_once_and_the_training_continues(system: str, tmp_path: Path) -> None:
    code = (
        "import buoy\nwatch = buoy.watch('runs/cats')\nbuoy.watch()\nwatch.step(); watch.epoch(1)\n"
        "with watch.phase('eval'): pass\nprint('trained', watch.folder)"
    )
    done = python(system, tmp_path, "-c", code)

    assert (done.returncode, done.stdout) == (0, "trained None\n")
    assert done.stderr == (
        f"buoy: recording needs Linux, and this is {NAMES[system]}: nothing is recorded, the training continues\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "code",
    [
        "import buoy; buoy.Run('runs/cats')",
        "from buoy import Run",
        "import buoy; buoy.keras.Guard('runs/cats')",
        "from buoy.keras import Loop",
        "import buoy.lightning",
        "from buoy.transformers import Guard",
        "from buoy.testing import byte_budget",
    ],
)
def test_checkpoints_and_guards_say_in_one_sentence_that_they_need_linux(
    system: str, tmp_path: Path, code: str
) -> None:
    done = python(system, tmp_path, "-c", code)
    *_, sentence, hint = done.stderr.splitlines()

    assert done.returncode == 1 and "Error: `buoy." in sentence
    assert sentence.endswith(f"Linux, and this is {NAMES[system]}") and "work here" in hint


def test_values_and_functions_of_the_package_are_there(system: str, desk: Path) -> None:
    code = (
        "import buoy; print(buoy.why('runs/cats').cause.id, len(buoy.check('train.py')), buoy.Keep(last=2).last, "
        "buoy.ExitCode.OK, [name for name in dir(buoy) if name == 'Run'])"
    )
    done = python(system, desk, "-c", code)

    assert done.stdout == "exit-code 0 2 0 ['Run']\n", done.stderr


def test_a_model_in_memory_is_planned_where_a_process_can_be_forked(system: str, desk: Path) -> None:
    code = "import buoy, build; print(buoy.plan(*build.build(), on='colab-t4').fits)"
    done = python(system, desk, "-c", code)

    if system == "darwin":
        assert done.stdout == "True\n", done.stderr
    else:
        assert "the objects of a running process cannot be planned on Windows" in done.stderr


def test_an_older_python_is_told_in_one_sentence(tmp_path: Path) -> None:
    """The version is a stand-in; that older parsers read the file so far is not."""
    for name in ("__init__.py", "__main__.py"):
        ast.parse((PACKAGE / name).read_text(), feature_version=(3, 7))
    code = "import sys; sys.version_info = (3, 10, 12, 'final', 0); import buoy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stderr.splitlines()[-1] == "ImportError: buoy needs Python 3.11 or newer, and this is 3.10.12"
