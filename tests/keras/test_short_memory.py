"""How a resumed Keras run splits its batches: as before, or with a message, while memory is short."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buoy.microbatch.sizing import logged
from tests.keras.trial import Live
from tests.processes import wait_until

LIMIT = 4 << 30
"""Its reserve has room for the graphs that TensorFlow makes; all else is taken."""
FOUND = "3000 samples would not fit in memory; using micro-batches of [0-9]+"
SAID = f"{FOUND}|batches are split now"
LOGS = {"fit": "micro-batches.jsonl", "loop": "micro-batches.step.jsonl"}

Lived = Callable[..., tuple[dict[int, str], str]]
pytestmark = pytest.mark.parametrize("how", LOGS)


@pytest.fixture
def lived(live: Live, make_session: Callable[[int], Path], tmp_path: Path, how: str) -> Lived:
    """A life of a run: the weights after each step, and what was said."""
    group = make_session(LIMIT)

    def life(
        name: str, samples: int, memory: str = "ample", dies_after: int = 0
    ) -> tuple[dict[int, str], str]:
        wait_until(
            lambda: not (group / "tasks").read_text(), "the end of all that is left of the life before"
        )
        ended = live("short", how, tmp_path / name, samples, group, memory, dies_after)
        assert ended["status"] == (signal.SIGKILL if dies_after else 0), ended["said"]
        lines = Path(f"{tmp_path / name}.log").read_text().splitlines()
        return dict(map(json.loads, lines)), ended["said"]

    return life


def entries(run: Path, how: str) -> list[dict[str, Any]]:
    """What was logged of its sizes."""
    return logged(str(run / LOGS[how]))


def is_split(entry: dict[str, Any]) -> bool:
    return entry.get("samples") is not None or "parts" in entry


def test_a_resume_while_memory_is_short_leaves_tiny_batches_whole(
    lived: Lived, tmp_path: Path, how: str
) -> None:
    """8 x 12 floats need KiB: splitting them gains nothing, and would change the bits."""
    undisturbed, _ = lived("undisturbed", 8)
    lived("run", 8, dies_after=8)
    resumed, said = lived("run", 8, "short")

    assert "left: 0\n" in said and not re.search(SAID, said), said
    assert list(resumed) == list(range(6, 21))
    assert resumed == {step: undisturbed[step] for step in resumed}
    assert not any(map(is_split, entries(tmp_path / "run", how)))


def test_lost_steps_are_done_again_whole_and_only_new_ones_are_split_with_a_message(
    lived: Lived, tmp_path: Path, how: str
) -> None:
    undisturbed, _ = lived("undisturbed", 3000)
    lived("run", 3000, dies_after=8)
    resumed, said = lived("run", 3000, "short")

    lost = {step: undisturbed[step] for step in (6, 7, 8)}
    assert {step: resumed[step] for step in lost} == lost
    split = [entry["step"] for entry in entries(tmp_path / "run", how) if is_split(entry)]
    assert split and min(split) >= 8, "counted from 0"
    assert re.search(SAID, said), said
    assert max(resumed) == 20


def test_a_first_batch_that_is_split_is_reported(lived: Lived, tmp_path: Path, how: str) -> None:
    _, said = lived("run", 3000, "short")

    first = entries(tmp_path / "run", how)[0]
    assert first["step"] == 0 and is_split(first)
    assert re.search(FOUND, said), said
