"""Scripts that use accelerate: prepared models, optimizers, schedulers and loaders resume bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch
from accelerate import Accelerator
import buoy

folder, last, workers, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 44  # the last window of an epoch is half a one

    def __getitem__(self, number):
        return torch.full((4,), float(number)) + torch.randn(4), torch.ones(1) * number


class Epochs(torch.utils.data.Sampler):  # as DistributedSampler: its order is the epoch's
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 44

    def __iter__(self):
        order = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(44, generator=order).tolist())


order = {"sampler": Epochs()} if kind == "epochs" else {"shuffle": True}
loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=workers, **order)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
run = buoy.Run(folder, save=2)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
seen = 0
for epoch in run.epochs(3):
    for x, y in run.batches(loader):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)
words = [value.item().hex() for p in model.parameters() for value in p.flatten()]
print(run.step, optimizer.param_groups[0]["lr"], *words)
"""


def train(folder: Path, last: int, workers: int, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(last), str(workers), kind]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        (2, "shuffle"),
        pytest.param(0, "shuffle", marks=pytest.mark.slow),
        pytest.param(0, "epochs", marks=pytest.mark.slow),
    ],
)
def test_what_accelerate_prepared_resumes_bit_for_bit(tmp_path: Path, workers: int, kind: str) -> None:
    whole = train(tmp_path / "whole", 0, workers, kind)
    assert whole.returncode == 0, whole.stderr
    for last in (7, 9, 13):  # in the first epoch, on both sides of the end of one
        assert train(tmp_path / "killed", last, workers, kind).returncode == -9
    resumed = train(tmp_path / "killed", 0, workers, kind)

    assert resumed.stdout == whole.stdout
    assert "not bit for bit" not in whole.stderr + resumed.stderr
    assert whole.stdout.startswith(
        "18 "
    )  # 11 batches are 6 steps: accelerate still knows the last batch of a pass
