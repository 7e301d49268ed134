"""DistributedDataParallel: rank 0 writes, all ranks resume bit for bit with the same parts, and all stop together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def test_two_ranks_agree_resume_and_stop_together(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.ranks", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    words = result["stderr"]

    assert words.count("out of memory") == 1, "rank 0 speaks for all, and nobody runs out of it a second time"
    assert "another process ran out of memory; retrying the step in micro-batches of 2" in words
    assert result["whole"] == [0, 0] == result["resumed"], words
    # The other one is killed after it, or sees the connection close first.
    survivor, killed = result["killed"]
    assert killed == signal.SIGKILL and survivor != 0, words
    first, second = result["told one rank to stop"]
    assert os.WEXITSTATUS(first) == 143 and second == signal.SIGTERM, words
    assert "resumed from step 7" in words, "the save that SIGTERM asked for was not made"
    assert result["alone"] == [1 << 8] and "2 in the checkpoint, 1 now" in words
    for rank in (0, 1):
        assert result[f"rank {rank} steps"] == 13
        assert result[f"rank {rank} differs"] == [], words
