"""Ctrl-C in a terminal reaches a loader's workers too: the checkpoint must still be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from buoy.checkpoint.store import Store

SCRIPT = """
import os, signal, sys, time
import torch
import buoy

class Slow(torch.utils.data.Dataset):
    def __init__(self, fails_at=None): self.fails_at = fails_at
    def __len__(self): return 4000
    def __getitem__(self, index):
        if index == self.fails_at:  # as a loader does whose workers were ended by the same signal
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("DataLoader worker exited unexpectedly")
        time.sleep(0.01)  # the training mostly waits for its workers
        return torch.randn(4), torch.tensor(1.0)

def train(folder, loader):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with buoy.Run(folder) as run:
        run.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in run.epochs(1):
            for x, y in run.batches(loader):
                (model(x).squeeze() - y).square().mean().backward()
                optimizer.step(); optimizer.zero_grad()
                print("step", run.step, flush=True)

if __name__ == "__main__":
    try:
        train(sys.argv[1] + "/failing", torch.utils.data.DataLoader(Slow(8), batch_size=4))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    train(sys.argv[1] + "/workers", torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2))
"""


def test_ctrl_c_saves_whether_the_workers_live_through_it_or_take_the_loader_with_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    training = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    assert training.stdout is not None
    while lines[-1:] != ["step 3"]:
        lines.append(training.stdout.readline().strip())
        assert training.poll() is None, training.communicate()
    os.killpg(training.pid, signal.SIGINT)
    out, err = training.communicate(timeout=60)

    assert lines == ["step 1", "step 2", "interrupted", "step 1", "step 2", "step 3"]
    (failing,) = Store(str(tmp_path / "failing")).list()
    assert failing.complete and (failing.step, failing.about["reason"]) == (2, "interrupt")
    (workers,) = Store(str(tmp_path / "workers")).list()
    assert workers.complete and workers.about["reason"] == "interrupt", err
    assert workers.step >= int((out.splitlines() or ["step 3"])[-1].split()[1])
    assert err.rstrip().endswith("KeyboardInterrupt")
