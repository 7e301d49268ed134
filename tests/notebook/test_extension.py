"""`%load_ext buoy` in real kernels: a death is shown in the next kernel's first cell, a training draws its card."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import INTERRUPTED, Kernel, html, traceback_of
from tests.processes import buoy, wait_until

Start = Callable[..., Kernel]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    kernels: list[Kernel] = []

    def begin(**environment: str) -> Kernel:
        kernels.append(Kernel(tmp_path, IPYTHONDIR=str(tmp_path / "ipython"), **environment))
        return kernels[-1]

    yield begin
    for kernel in kernels:
        kernel.end()


def verdict_exists(tmp_path: Path, number: int = 1, run: str = "notebook") -> None:
    path = tmp_path / "runs" / run / "attempts" / f"{number:04d}" / "verdict.json"
    wait_until(path.exists, "the verdict")


def test_a_cell_killed_for_memory_is_explained_in_the_next_kernels_first_cell(
    start: Start, tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    kernel = start()
    group = make_session(400 << 20)
    (group / "cgroup.procs").write_text(str(kernel.pid))
    first = kernel.run("%load_ext buoy")
    kernel.start("# load the images\nimages = [bytearray(b'x' * (20 << 20)) for _ in range(100)]")
    verdict_exists(tmp_path)

    card = html(start().run("%load_ext buoy"))

    assert html(first) == ""  # nothing had died before
    assert "kernel-oom" in card
    assert ">certain<" in card or ">likely<" in card
    assert "In [2] images = [bytearray" in card
    assert "<b>next</b>" in card
    assert "<script" not in card and "http" not in card


def test_a_kernel_that_was_recorded_before_the_extension_came_tells_of_the_last_death_too(
    start: Start, tmp_path: Path
) -> None:
    kernel = start()
    kernel.run("import buoy; watched = buoy.watch('runs/cats')")
    kernel.start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    verdict_exists(tmp_path, run="cats")
    second = start()
    second.run("import buoy; watched = buoy.watch('runs/cats')")

    shown = second.run("%load_ext buoy")

    assert "SIGKILL" in html(shown)
    assert not (tmp_path / "runs" / "notebook").exists()
    assert html(second.run("%reload_ext buoy")) != ""  # asked for again, told again


def test_installed_it_loads_by_itself_and_a_notebook_that_trains_nothing_gets_no_folder(
    start: Start, tmp_path: Path
) -> None:
    installed = buoy("notebook", "install", env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")})
    kernel = start(JPY_SESSION_NAME="/content/Cats and dogs.ipynb")
    kernel.run("1 + 1")
    without = list(tmp_path.glob("runs/*"))
    (tmp_path / "jax.py").write_text("")  # stands for a framework: importing it is what tells a training
    kernel.run("import jax")
    wait_until(lambda: list(tmp_path.glob("runs/*")), "the run folder")
    os.kill(kernel.pid, signal.SIGKILL)
    verdict_exists(tmp_path, run="Cats and dogs")

    card = html(start(JPY_SESSION_NAME="/content/Cats and dogs.ipynb").run("x = 1"))

    assert installed.returncode == 0
    assert without == []
    assert "<b>killed</b>" in card


def test_a_kernel_that_ended_in_order_is_not_mentioned_and_one_that_left_its_cell_is(
    start: Start, tmp_path: Path
) -> None:
    """Both with exit code 0."""
    kernel = start()
    kernel.run("%load_ext buoy")
    kernel.run("exit()")
    verdict_exists(tmp_path)
    second = start()
    after_order = html(second.run("%load_ext buoy"))
    second.start("import os; os._exit(0)")
    verdict_exists(tmp_path, 2)

    card = html(start().run("%load_ext buoy"))

    assert after_order == ""
    assert "exit code 0 in the middle of a cell" in card and "In [2] import os" in card


def test_a_killed_kernel_is_told_of_once_whatever_else_records_into_its_folder(
    start: Start, tmp_path: Path
) -> None:
    """Another kernel that lives, a script that dies and one that ends well, all in one folder."""
    kernel, beside = start(), start()
    for each in (kernel, beside):
        each.run("%load_ext buoy")
    os.kill(kernel.pid, signal.SIGKILL)
    verdict_exists(tmp_path)
    for end in ("os.abort()", "pass"):
        buoy("run", "--run", "runs/notebook", "--", sys.executable, "-c", f"import os; {end}", cwd=tmp_path)

    after = start()
    first, asked = html(after.run("%load_ext buoy")), html(after.run("%buoy why"))
    again = html(beside.run("%reload_ext buoy"))

    assert first.count('class="buoy-card"') == 1 and "<b>killed</b>" in first and "attempt 1" in first
    assert "attempt 1 may not have been this notebook&#x27;s" in first
    assert "<b>killed</b>" in asked and "attempt 1" in asked and "about an earlier kernel" in asked
    assert again == ""


TRAIN = """
import buoy
from buoy.training.manager import CheckpointManager
keeper = CheckpointManager("runs/cats")
with keeper.loop():
    for step in range(3):
        keeper.due(step)
        keeper.recorder.step(step + 1)
    %s
"""


def test_a_training_that_an_exception_left_keeps_that_story_when_its_kernel_is_restarted(
    start: Start, tmp_path: Path
) -> None:
    """Asked in a cell of the same kernel, and after a SIGTERM between two cells."""
    kernel = start()
    kernel.run("%load_ext buoy")
    within = kernel.run(TRAIN % "print(buoy.why('runs/cats'))")
    paused = kernel.run("print(buoy.why('runs/cats'))")
    kernel.run(TRAIN % "raise ValueError('bad labels')")
    asked = kernel.run("print(buoy.why('runs/cats'))")
    os.kill(kernel.pid, signal.SIGTERM)
    verdict_exists(tmp_path)

    shown = start().run("%load_ext buoy")

    assert "It is still running" in str(within)
    assert "is alive and idle; this training stopped at step 3" in str(paused)
    assert "this training stopped at step 3, unfinished" in str(asked) and "ValueError" in str(asked)
    assert "buoy-card" not in html(shown) and "SIGTERM" in html(shown)
    assert "cats stopped at step 3, unfinished, with ValueError" in html(shown)
    after = buoy("why", "runs/cats", cwd=tmp_path).stdout
    assert after.startswith("left: cats") and "stopped at step 3, unfinished" in after


def test_a_training_draws_one_card_and_updates_it(start: Start) -> None:
    kernel = start()
    kernel.run("%load_ext buoy")
    shown = kernel.run(
        "import time\nfrom buoy.flight.recorder import current\n"
        "for _ in range(55):\n    current().step(); time.sleep(0.1)"
    )
    cards = [item for item in shown if item["kind"] == "display_data"]
    updates = [item for item in shown if item["kind"] == "update_display_data"]

    assert len(cards) == 1
    assert 1 <= len(updates) <= 3  # every two seconds, and once when the cell ends
    assert "step 55" in updates[-1]["data"]["text/html"]
    assert "step 55" in updates[-1]["data"]["text/plain"]

    train = "for _ in range(25):\n    current().step(); time.sleep(0.1)"
    assert "no more cards in this kernel" in html(kernel.run("%buoy off"))
    assert kernel.run(train) == []
    kernel.run("%reload_ext buoy")
    assert "step 105" in html(kernel.run(train))


def test_magics_answer_in_words(start: Start) -> None:
    kernel = start()
    kernel.run("%load_ext buoy")
    kernel.run("import numpy as np")
    kernel.run("x = np.zeros(3)\nprint(undefined_thing_of_mine)")

    assert "no recording of an earlier kernel" in html(kernel.run("%buoy why"))
    kernel.run(
        "import buoy\nfor _ in range(30): buoy.watch().step()\nraise ValueError('broken image 17.jpg')"
    )
    today = html(kernel.run("%buoy why"))
    assert (
        "ended with ValueError: broken image 17.jpg" in today and "trained to step 30: no checkpoint" in today
    )
    wait_until(lambda: "idle" in html(kernel.run("%buoy top")), "a sample")
    assert "RAM" in html(kernel.run("%buoy top"))
    assert "undefined_thing_of_mine" in html(kernel.run("%buoy check"))
    report = html(kernel.run("%buoy report"))
    assert "srcdoc" in report and "about runs/notebook; written to runs/notebook/report.html" in report
    interrupted = traceback_of(kernel.run(INTERRUPTED))
    assert "my last line" in interrupted and "signals.py" not in interrupted
    assert "about runs/cats; written to runs/cats/report.html" in html(kernel.run("%buoy report"))
    assert "not one of buoy&#x27;s verbs" in html(kernel.run("%buoy sing"))
    for verb in ("why typo", "top --once", "check train.py", "report extra", "off now"):
        refused = html(kernel.run(f"%buoy {verb}"))
        assert f"`%buoy {verb.split()[0]}` takes no further arguments" in refused
        assert f"received: `%buoy {verb}`" in refused
    assert 'class="buoy-card"' in html(kernel.run("import buoy; buoy.why()"))


def test_what_cannot_be_written_or_mended_here_is_said_in_a_notebooks_words(
    start: Start, tmp_path: Path
) -> None:
    kernel = start(JPY_SESSION_NAME="/content/Cats.ipynb")
    kernel.run("%load_ext buoy")
    kernel.run("import torch\nlosses = []\nfor batch in []:\n    losses.append(loss)\n    loss.backward()")
    printed = kernel.run("print(repr(get_ipython().run_line_magic('buoy', 'check')))")
    next(tmp_path.glob("runs/*/run.json")).with_name("report.html").mkdir()
    report = html(kernel.run("%buoy report"))

    found = "".join(item.get("text", "") for item in printed)
    assert "(change the cell)" in found
    assert "--fix" not in found
    assert "Cats.ipynb:cell 2:4:" in found and "in 3 cells run so far" in found
    assert "srcdoc" in report  # it is shown all the same
    assert "cannot write the report" in report
    assert "`!buoy report RUN -o FILE` writes it elsewhere" in report


def test_hints_in_a_kernel_speak_of_what_a_notebook_can_do(start: Start, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    kernel = start()

    said = "".join(item["text"] for item in kernel.run("%load_ext buoy"))
    asked = html(kernel.run("%buoy why"))
    raised = kernel.run("import buoy; buoy.why()")[0]["evalue"]
    unrecorded = html(kernel.run("%buoy top"))
    begun = "".join(item["text"] for item in kernel.run("import os; os.unlink('runs'); _ = buoy.watch()"))

    assert "nothing is recorded" in said and "`buoy.watch(DIR)`" in said
    assert "`buoy.Run(&quot;runs/cats&quot;)`" in asked
    assert "`%load_ext buoy` records this notebook" in raised
    assert "nothing is recorded of this kernel</pre>" in unrecorded
    assert begun == f"buoy: a new recording starts in {tmp_path / 'runs' / 'notebook'}\n"
    wait_until(lambda: "RAM" in html(kernel.run("%buoy top")), "a sample of it")
    for text in (said, asked, raised):
        assert "--run" not in text and "buoy run" not in text
