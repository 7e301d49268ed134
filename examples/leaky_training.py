"""A training as thousands are written, with one line that kills it: it keeps every output, graph and all.

Run it with `--mended` to see the same training without that line.
"""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256))
optimizer = torch.optim.AdamW(model.parameters())
history = []

for step in range(400):
    inputs = torch.randn(512, 256)
    outputs = model(inputs)
    loss = (outputs - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--mended" in sys.argv:
        history.append(loss.item())
    else:
        history.append((loss, outputs))  # keeps the outputs of every step alive
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

print(f"finished {len(history)} steps")
