"""A plain PyTorch loop with the classic leak: it keeps each loss together with its graph."""

import torch

torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
import stage  # noqa: E402

stage.ready()
while True:
    batch = torch.randn(65536, 64)
    loss = model(batch).relu().square()
    loss.mean().backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
