"""Two ranks that average gradients over gloo; the campaign kills the second."""

import os

import stage  # isort: skip
import torch
import torch.distributed
import torch.multiprocessing


def rank(index, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    step = 0
    while True:
        torch.distributed.all_reduce(torch.ones(8))
        step += 1
        if step == 20 and index == 1:
            stage.say("ready-rank")
            stage.wait("go")


if __name__ == "__main__":
    stage.say("ready")
    torch.multiprocessing.spawn(rank, (os.path.join(os.path.abspath(stage.FOLDER), "store"),), nprocs=2)
