"""Build functions and a script's pieces for the planner's tests; loaded by path in the tracing child."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.relu(self.wide(x)))


def samples(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, width, device="meta"), torch.zeros(count, dtype=torch.long, device="meta")


def activations():
    """Owned by activations: too much for a T4 in one piece."""
    return nn.Sequential(*[Block(1024) for _ in range(4)]), samples(200_000, 1024)


def parameters():
    """Owned by weights and optimizer: no micro-batch helps."""
    return nn.Sequential(*[Block(4096) for _ in range(8)]), samples(4, 4096)


def normalised():
    """With BatchNorm, for which smaller pieces are another training."""
    return nn.Sequential(nn.Linear(1024, 8192), nn.BatchNorm1d(8192), nn.Linear(8192, 10)), samples(
        200_000, 1024
    )


def nonsense():
    return 7


def endless():
    import time

    time.sleep(600)


def raising():
    raise KeyError("no such flag")


def prompting():
    return input("which model? ")


def forking():
    import os

    if os.fork() == 0:
        import time

        time.sleep(300)
    return 7


def on_cuda():
    model = nn.Linear(64, 10).cuda()
    return model.to("cuda:0"), (torch.zeros(8, 64, device="cuda"), torch.zeros(8, dtype=torch.long).cuda())


class Custom(nn.Module):
    """Calls an operation that nobody wrote a meta kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.planner_tests.doubled(self.layer(x))


def custom_operation():
    library = torch.library.Library("planner_tests", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    builds_kept.append(library)
    return Custom(), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))


builds_kept: list[object] = []


def bert_medium():
    """A size of a known family: its next smaller sibling is bert-small."""
    from transformers import BertConfig, BertForMaskedLM

    size = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 2048}
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return BertForMaskedLM(BertConfig(**size)), {"input_ids": tokens, "labels": tokens}
