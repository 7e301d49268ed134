"""The same training with buoy: the run, the batches and the backward pass are its own."""

from __future__ import annotations

import os
import sys

import torch
from torch.nn.functional import cross_entropy

import buoy
from buoy.demo.task import EPOCHS, fingerprint, make, peak_mib

write = sys.stdout.write

model, optimizer, loader = make()


def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
    """Of as many samples as buoy chooses to look at together."""
    pictures, labels = batch
    return cross_entropy(model(pictures), labels)


run = buoy.Run(sys.argv[1], save=1, micro_batch=int(sys.argv[2]) if sys.argv[2:] else None)
run.track(model=model, optimizer=optimizer)
write(f"pid {os.getpid()}\n")
for _ in run.epochs(EPOCHS):
    for batch in run.batches(loader):
        loss = run.backward(batch, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        write(f"step {run.step} {float(loss)!r}\n")
        sys.stdout.flush()
write(f"weights {fingerprint(model)}\n")
write(f"peak {peak_mib()}\n")
