"""The notebooks in examples/ are run in real kernels, on data made here or by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.make_notebooks import CHARACTERS, KERAS_IMAGES, TORCH_IMAGES, notebook

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
np = pytest.importorskip("numpy")
EXAMPLES = Path(__file__).parent.parent / "examples"
TEXTS = {"torch_images": TORCH_IMAGES, "keras_images": KERAS_IMAGES, "characters": CHARACTERS}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_notebook_is_what_the_script_writes(name: str) -> None:
    assert json.loads((EXAMPLES / f"{name}.ipynb").read_text()) == notebook(TEXTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_notebook_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 96)
    images = (random.random((96, 16, 16, 3)) * 80 + labels[:, None, None, None] * 80).astype(np.uint8)
    if name == "keras_images":  # the others find nothing, and make or take something themselves
        np.savez(tmp_path / "images.npz", images=images, labels=labels)
    monkeypatch.setenv("EPOCHS", "2")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    read = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        read, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )

    client.execute()

    shown = json.dumps(read.cells[-1].outputs)
    assert "safe at step" in shown  # the last cell is `%buoy top`: a checkpoint is there
