"""Ranks shrink together, never pair different batches and never wait for one that has failed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "ranks.py"
KINDS = ["plain", "unused", "accumulation", "batchnorm", "bug", "empty"]
Ranks = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of two ranks says at the end; all kinds in one start."""
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
    command += ["--rdzv-endpoint", "localhost:0", str(PROGRAM), str(folder), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return lambda kind: [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["plain", "unused", "accumulation"])
def test_ranks_shrink_together_and_train_as_one_process_would(kind: str, ranks: Ranks) -> None:
    first, second = ranks(kind)

    assert "error" not in first
    assert "error" not in second
    assert first["weights"] == second["weights"]
    assert first["off"] < 1e-6
    assert first["sizes"] == second["sizes"]
    assert second["said"]


def test_buffers_are_exchanged_outside_of_the_tries(ranks: Ranks) -> None:
    """DDP broadcasts them inside forward, where a rank that fails would leave the others waiting."""
    first, second = ranks("batchnorm")

    assert first["steps"] == second["steps"] == 6
    assert first["weights"] == second["weights"]


def test_a_bug_on_one_rank_ends_both_at_the_same_step(ranks: Ranks) -> None:
    first, second = ranks("bug")

    assert second["error"] == "ValueError: label out of range"
    assert first["error"].startswith("PeerFailed: another process could not do this step")
    assert first["steps"] == second["steps"] == 4
    assert first["weights"] == second["weights"]


def test_an_empty_batch_on_one_rank_leaves_nobody_waiting(ranks: Ranks) -> None:
    first, second = ranks("empty")

    assert second["error"].startswith("BadBatch: the batch is empty")
    assert first["error"].startswith("PeerFailed")
    assert first["steps"] == second["steps"] == 2
