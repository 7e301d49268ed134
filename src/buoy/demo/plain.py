"""The training as everybody writes it."""

from __future__ import annotations

import sys

from torch.nn.functional import cross_entropy

from buoy.demo.task import EPOCHS, fingerprint, make, peak_mib

write = sys.stdout.write

model, optimizer, loader = make()
write(f"before {peak_mib()}\n")
step = 0
for _ in range(EPOCHS):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        write(f"step {step} {loss.item()!r}\n")
        sys.stdout.flush()
write(f"weights {fingerprint(model)}\n")
write(f"peak {peak_mib()}\n")
