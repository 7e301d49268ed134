"""The host's RAM is a device too: a step that would cross the session's limit is cut before the kernel kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "host.py"
LIMIT = 460 << 20


def start(kind: str, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    def join() -> None:
        if group is not None:
            (group / "tasks").write_text(str(os.getpid()))

    return subprocess.run([sys.executable, str(PROGRAM), kind], capture_output=True, text=True, timeout=400,
                          check=False, preexec_fn=join)  # fmt: skip


def kills(group: Path) -> int:
    return int((group / "memory.oom_control").read_text().split()[-1])


def test_a_batch_too_large_for_the_session_is_cut_and_nothing_is_killed(
    make_session: Callable[[int], Path],
) -> None:
    plain, guarded = make_session(LIMIT), make_session(LIMIT)
    killed, done = start("plain", plain), start("guarded", guarded)

    assert killed.returncode == -signal.SIGKILL
    assert kills(plain) == 1
    assert done.returncode == 0, done.stderr
    assert kills(guarded) == 0
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["retries"] >= 1, (
        "the first that is too large is an exception, and teaches the sizes of the others"
    )
    assert answer["sizes"][0]["step"] == 4


def test_a_cap_turns_a_kill_into_an_exception_that_is_recovered_from() -> None:
    done = start("capped")

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "can't allocate memory" in answer["raised"]
    assert answer["sizes"]
