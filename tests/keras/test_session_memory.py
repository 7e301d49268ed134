"""The host's RAM is a device too: a step that would cross the session's limit is cut before the kernel kills."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.keras.trial import Live

LIMIT = 420 << 20
"""The interpreter and TensorFlow, which the children share with their parent, are not counted here."""


def answer(folder: Path) -> dict[str, Any]:
    return dict(json.loads(Path(f"{folder}.json").read_text()))


def kills(group: Path) -> int:
    return int((group / "memory.oom_control").read_text().split()[-1])


def test_a_batch_too_large_for_the_session_is_cut_and_nothing_is_killed(
    live: Live, make_session: Callable[[int], Path], tmp_path: Path
) -> None:
    small, same, large = make_session(LIMIT), make_session(LIMIT), make_session(4 << 30)
    killed = live("session", "plain", tmp_path / "killed", small)
    done = live("session", "guarded", tmp_path / "done", same)
    plain = live("session", "plain", tmp_path / "plain", large)

    assert os.WTERMSIG(killed["status"]) == signal.SIGKILL and kills(small) == 1
    assert done["status"] == 0 and kills(same) == 0, done["said"]
    assert plain["status"] == 0, plain["said"]
    guarded = answer(tmp_path / "done")
    assert "24000 samples would not fit in memory" in guarded["said"]
    assert "out of memory" not in guarded["said"], "it was foreseen, not found out by failing"
    assert guarded["losses"] == pytest.approx(answer(tmp_path / "plain")["losses"], rel=1e-5)


def test_a_cap_raises_where_the_kernel_would_kill(live: Live, tmp_path: Path) -> None:
    done = live("session", "capped", tmp_path / "capped")

    assert done["status"] == 0, done["said"]
    assert "Unable to allocate 1.00 GiB" in answer(tmp_path / "capped")["raised"]
