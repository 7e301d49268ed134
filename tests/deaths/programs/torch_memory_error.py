"""torch's CPU allocator is refused memory."""

import stage  # isort: skip
import torch

stage.ready()
torch.empty(1 << 45)
