"""A batch that cannot be cut, in a session too small for it: a refusal in words, never the kernel's kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LARGE = 4 << 30
SHORT = 150 << 20
"""Of a step that needs 200 MiB and more."""
MARGIN = 96 << 20
"""Beside what the plain training needs: buoy itself, what is computed to measure it, and the error of the forecast."""


def start(kind: str, tie: str, folder: Path, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    def join() -> None:
        if group is not None:
            (group / "tasks").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "tests.keras.unsplit", kind, tie, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, preexec_fn=join,
                          cwd=Path(__file__).parents[2])  # fmt: skip


def kills(group: Path) -> int:
    return int((group / "memory.oom_control").read_text().split()[-1])


@pytest.mark.parametrize(
    ("tie", "why"),
    [
        ("batch_norm", "BatchNormalization cannot be split"),
        pytest.param("tokens", "CannotSplit: ", marks=pytest.mark.slow),
        pytest.param("pairs", "CannotSplit: ", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words_and_done_where_it_fits(
    make_session: Callable[[int], Path], tmp_path: Path, tie: str, why: str
) -> None:
    large = make_session(LARGE)
    start(
        "plain", tie, tmp_path
    )  # the files it reads are then in the page cache, and not on the session's account
    assert start("plain", tie, tmp_path, large).returncode == 0
    needed = int((large / "memory.max_usage_in_bytes").read_text())
    short, same, enough = (make_session(needed - SHORT), make_session(needed - SHORT),
                           make_session(needed + MARGIN))  # fmt: skip
    killed = start("plain", tie, tmp_path, short)
    refused = start("guarded", tie, tmp_path / "refused", same)
    done = start("guarded", tie, tmp_path / "done", enough)

    assert killed.returncode == -signal.SIGKILL and kills(short) == 1
    assert refused.returncode == 1 and kills(same) == 0, refused.stderr
    assert "samples would not fit in memory: they need about" in refused.stderr
    assert why in refused.stderr and "CannotSplit" in refused.stderr
    assert done.returncode == 0 and kills(enough) == 0, done.stderr
    named = start("named", tie, tmp_path / "named", same)
    assert named.returncode == -signal.SIGKILL and "would not fit" not in named.stderr
