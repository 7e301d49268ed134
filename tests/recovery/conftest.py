"""Light garbage collection, and two ranks under torchrun, started once."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

Ranks = Callable[[str], list[dict[str, Any]]]
_ROOT = Path(__file__).parents[2]
_KINDS = ["plain", "unused", "accumulation", "batchnorm", "bug", "empty", "sharded", "ignored"]
_KINDS += ["exchanging-cut", "exchanging", "static", "inner", "join"]


@pytest.fixture(autouse=True, scope="module")
def _light_garbage_collection() -> Iterator[None]:
    """Each recovery collects garbage; that must not walk over all of torch and pytest every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of two ranks says at the end of a kind; all kinds in one start."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "tests.recovery.programs.ranks", str(folder), *_KINDS]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return lambda kind: [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]
