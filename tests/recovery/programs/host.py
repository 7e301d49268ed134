"""Trains in a small memory group; one batch is far too large for it. `plain` or `guarded`, or under a cap."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from buoy.torch.memory.device import host_memory
from buoy.torch.step.transaction import Transaction

KIND = sys.argv[1]
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 512), nn.Sigmoid(), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters())
said: list[str] = []
cap = (host_memory().used() or 0) + (200 << 20) if KIND == "capped" else None
transaction = Transaction(say=said.append, event=lambda *a, **k: None, memory_cap=cap)
transaction.track([model], [optimizer])


def loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(part[0]), part[1])


raised = None
if KIND == "capped":
    try:
        torch.empty(1 << 30, dtype=torch.uint8)
    except RuntimeError as error:
        raised = str(error)
for step in range(10):
    samples = 60_000 if step in (4, 6, 7) else 1000
    x, y = torch.randn(samples, 4), torch.randn(samples, 1)
    if KIND == "plain":
        loss((x, y)).backward()
    else:
        transaction.backward((x, y), loss)
    optimizer.step()
    optimizer.zero_grad()
print(
    json.dumps({"said": said, "sizes": transaction.sizes, "raised": raised, "retries": transaction.retries})
)
