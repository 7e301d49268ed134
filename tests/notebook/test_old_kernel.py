"""The same in the oldest kernel that Colab still ships: IPython 7.34 with ipykernel 6.17."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.kernels import INTERRUPTED, Kernel, html, traceback_of
from tests.processes import wait_until

SOURCE = Path(__file__).parent.parent.parent / "src"


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("old") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "ipython==7.34.0", "ipykernel==6.17.1"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=400)
    if done.returncode != 0:
        pytest.skip(f"IPython 7.34 cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
def test_the_card_the_live_card_and_the_magics_work_in_ipython_7(old_python: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(SOURCE), "IPYTHONDIR": str(tmp_path / "ipython")}
    kernel = Kernel(tmp_path, python=old_python, **environment)
    versions = kernel.run("import IPython, ipykernel; print(IPython.__version__, ipykernel.__version__)")
    kernel.run("%load_ext buoy")
    shown = kernel.run(
        "import time\nfrom buoy.flight.recorder import current\n"
        "for _ in range(25):\n    current().step(); time.sleep(0.1)"
    )
    stuck = kernel.run(
        "current().event('warning', alarm='ram-level', text='RAM is full', values={})\ntime.sleep(7)"
    )
    top = html(kernel.run("%buoy top"))
    interrupted = traceback_of(kernel.run(INTERRUPTED))
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until((tmp_path / "runs/notebook/attempts/0001/verdict.json").exists, "the verdict")
    kernel.end()
    again = Kernel(tmp_path, python=old_python, **environment)
    card = html(again.run("%load_ext buoy"))
    again.end()

    assert versions[0]["text"] == "7.34.0 6.17.1\n"
    assert shown[0]["kind"] == "display_data"
    assert {item["kind"] for item in shown[1:]} == {"update_display_data"}
    assert [item["kind"] for item in stuck][:2] == ["display_data", "update_display_data"]
    assert "RAM is full" in html(stuck)
    assert "step 25" in top
    assert "my last line" in interrupted and "signals.py" not in interrupted
    assert "<b>killed</b>" in card
