"""The notebook's stop button, on a real kernel: a checkpoint, then the interrupt, and the kernel as before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from buoy.checkpoint.store import Store
from tests.notebook.kernels import Kernel
from tests.processes import wait_until


def test_the_stop_button_saves_interrupts_the_cell_and_leaves_the_kernel_as_it_was(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    kernel = Kernel(tmp_path, PYTHONPATH=path)
    try:
        kernel.run(
            "import signal; from tests.training.loop import *; before = signal.getsignal(signal.SIGTERM)"
        )
        kernel.start("train('run', steps=100_000, each=lambda step: open('reached', 'w').write(str(step)))")
        wait_until((tmp_path / "reached").exists, "the first step")
        time.sleep(0.2)
        os.kill(kernel.pid, signal.SIGINT)  # what the button does
        wait_until(lambda: Store(str(tmp_path / "run")).list(), "the checkpoint")
        # A cell that is sent before the interrupted one has ended is dropped with it: send it again.
        question = "print(signal.getsignal(signal.SIGTERM) == before)"
        shown = wait_until(lambda: kernel.run(question), "an answer from the kernel")
    finally:
        kernel.end()

    (entry,) = Store(str(tmp_path / "run")).list()
    assert entry.complete and entry.about["reason"] == "interrupt"
    assert "True" in str(shown)  # the kernel lives, and its handlers are its own again


MADE = """
import torch, buoy
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def make(folder="runs/cats"):
    global run
    run = buoy.Run(folder)
    run.track(model=model, optimizer=optimizer)

def train(epochs):
    for epoch in run.epochs(epochs):
        for x in run.batches([torch.ones(1, 2)] * 2):
            model(x).sum().backward(); optimizer.step()

make()
"""


def test_a_loop_cell_run_again_after_its_end_says_that_it_trains_on(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    said = []
    try:
        kernel.run(MADE)
        for cell in (
            "train(1); train(1)",  # two phases in one cell are nobody's mistake
            "train(3)",
            "make(); train(6)",
            "train(1)",
            "run.finish()",
            "train(1)",
            "make(None); train(1)",
            "train(1)",
        ):
            said.append("".join(item.get("text", "") for item in kernel.run(cell)))
    finally:
        kernel.end()

    ended = "the epochs of this Run had ended, at step"
    hint = ". To train only what is missing of {}, first run the cell that makes the Run\n"
    assert ended not in said[0]
    assert said[1] == f"buoy: {ended} 4; training 3 more{hint.format(3)}"
    assert ended not in said[2]  # made again, it trains what is missing
    assert said[3] == f"buoy: {ended} 12; training 1 more{hint.format(1)}"
    assert said[5].startswith("buoy: this Run is finished, at step 14: it saves nothing more")
    assert said[6] == ""
    assert said[7] == f"buoy: {ended} 2; training 1 more\n"
