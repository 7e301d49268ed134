"""A healthy PyTorch loop; it says that it is ready after 20 steps."""

import stage
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while not stage.said("go"):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 20:
        stage.say("ready")
