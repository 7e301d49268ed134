"""Runs trainings whole, and again with kills, each attempt in a fork of one process that has torch loaded."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
import traceback
from importlib import import_module

import numpy as np
import torch

from tests.guards.lives import read
from tests.training.trainings import TRAININGS, Stage


def warm_up() -> None:
    """Load what the first steps would load, so that every fork has it."""
    torch.set_num_threads(1)
    import_module("torchdata.stateful_dataloader")
    import_module("buoy.training.run")
    import_module("buoy.training.manager")
    import_module("buoy.training.ranks")
    import_module("buoy.torch.step.transaction")
    model = torch.nn.Linear(1, 1)
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def attempt(name: str, folder: str, kill_at: int | None, number: int) -> int:
    """One life of a training; its wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        messages = os.open(f"{folder}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(messages, 2)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        TRAININGS[name](Stage(folder, f"{folder}.log", kill_at, number))
        code = 0
        import atexit

        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def trial(name: str, folder: str, kills: list[int]) -> dict[str, object]:
    """Run it whole, run it with kills, and compare."""
    started = time.monotonic()
    whole, cut = os.path.join(folder, f"{name}-whole"), os.path.join(folder, f"{name}-cut")
    statuses = [attempt(name, whole, None, 0)]
    for number, kill_at in enumerate([*kills, None]):
        statuses.append(attempt(name, cut, kill_at, number))
    expected, _ = read(f"{whole}.log")
    got, unlike = read(f"{cut}.log")
    with open(f"{cut}.stderr", encoding="utf-8") as file:
        words = file.read()
    return {
        "name": name,
        "killed": [os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL for status in statuses],
        "ended": statuses[-1] == 0 and statuses[0] == 0,
        "steps": len(expected),
        "differ": [step for step in expected if got.get(step) != expected[step]],
        "unlike": unlike,
        "resumed": words.count("resumed from step"),
        "said": words[-3000:],
        "seconds": time.monotonic() - started,
    }


@functools.cache
def warm_up_compiler() -> None:
    """It takes seconds to load, and nobody else needs it."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager", dynamic=True)(torch.ones(2, 1)).sum().backward()


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        name, kills = json.loads(line)
        if name == "compiled":
            warm_up_compiler()
        print(json.dumps(trial(name, sys.argv[1], kills)), flush=True)
