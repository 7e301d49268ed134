"""A batch that cannot be split, in a session too small for it: a refusal in words, never the kernel's kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "unsplit.py"
LARGE = 4 << 30
SHORT = 150 << 20
"""Of a step that needs 300 MiB and more."""
MARGIN = 48 << 20
"""Beside what the plain training needs: buoy itself, and the distance to the limit at which it refuses."""


def start(kind: str, tie: str, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    def join() -> None:
        if group is not None:
            (group / "tasks").write_text(str(os.getpid()))

    return subprocess.run([sys.executable, str(PROGRAM), kind, tie], capture_output=True, text=True, timeout=400,
                          check=False, preexec_fn=join)  # fmt: skip


def kills(group: Path) -> int:
    return int((group / "memory.oom_control").read_text().split()[-1])


@pytest.mark.parametrize(
    "tie",
    [
        "batch_norm",
        pytest.param("tokens", marks=pytest.mark.slow),
        pytest.param("pairs", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words_and_done_where_it_fits(
    make_session: Callable[[int], Path], tie: str
) -> None:
    large = make_session(LARGE)
    start("plain", tie)  # the files it reads are then in the page cache, and not on the session's account
    assert start("plain", tie, large).returncode == 0
    needed = int((large / "memory.max_usage_in_bytes").read_text())
    short, same, enough = (make_session(needed - SHORT), make_session(needed - SHORT),
                           make_session(needed + MARGIN))  # fmt: skip
    killed, refused, done = (
        start("plain", tie, short),
        start("guarded", tie, same),
        start("guarded", tie, enough),
    )

    assert killed.returncode == -signal.SIGKILL and kills(short) == 1
    assert "a step begins" in refused.stdout
    assert refused.returncode == 1 and kills(same) == 0, refused.stderr
    assert "CannotSplit: out of memory, and this batch cannot be split" in refused.stderr
    assert done.returncode == 0 and kills(enough) == 0, done.stderr
