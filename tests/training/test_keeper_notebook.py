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
    root = str(Path(__file__).parents[2])
    kernel = Kernel(tmp_path, PYTHONPATH=root)
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
