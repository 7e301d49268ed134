"""The child of `bench checkpoint` that loads a checkpoint as a resumed training does: in a new process, once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

from bench.checkpoint_torch import LAYERS, WIDTH, Block
from buoy.checkpoint.store import Store
from buoy.torch.state.tensors import kept, lent


def main() -> None:
    who, path = sys.argv[1], Path(sys.argv[2])
    model = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    started = time.perf_counter()
    if who == "torch.load":
        read = torch.load(path)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
    else:
        store = Store(path)
        checkpoint = store.open(store.list()[0])
        model.load_state_dict(checkpoint.value("model", lent))  # type: ignore[arg-type]
        optimizer.load_state_dict(checkpoint.value("optimizer", kept))  # type: ignore[arg-type]
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
