"""The writer is slow only while somebody needs the processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buoy.checkpoint.pace import _needs_us_slow
from tests.checkpoint.ground import about, as_tensor, open_saver, state, writers


def after_a_second(
    trainer: float | None, ours: float, idle: float | None, quota: float | None = None
) -> bool:
    return _needs_us_slow((0.0, 0.0, 0.0, 0.0), (1.0, trainer, ours, idle), quota)


def test_a_trainer_that_waits_or_is_dead_is_not_slowed() -> None:
    assert not after_a_second(0.01, 1.0, 0.5)
    assert not after_a_second(None, 1.0, 0.0)


def test_a_trainer_on_all_cores_is_spared() -> None:
    assert after_a_second(1.9, 0.1, 0.0)
    assert after_a_second(1.0, 0.1, 0.1), "its data-loading workers have the other core"


def test_a_core_that_nobody_uses_is_ours() -> None:
    assert not after_a_second(1.0, 0.9, 0.1)
    assert not after_a_second(1.0, 0.0, 1.0)


def test_a_quota_counts_where_the_machine_has_more_cores() -> None:
    assert after_a_second(1.9, 0.1, 62.0, quota=2.0)
    assert not after_a_second(1.0, 0.1, 62.0, quota=2.0)


def test_what_cannot_be_read_makes_it_slow() -> None:
    assert after_a_second(1.0, 0.1, None)


def test_the_writer_steps_back_as_a_group_too(tmp_path: Path) -> None:
    """It is a session of its own, and the kernel weighs sessions against each other: nice alone means nothing then."""
    if not os.path.exists("/proc/self/autogroup"):
        pytest.skip("this kernel does not group processes by session")
    saver = open_saver(tmp_path)
    saver.save(state(1), about(1), as_tensor, wait=True)
    (writer,) = writers(tmp_path)
    assert Path(f"/proc/{writer}/autogroup").read_text().split()[-1] == "15"
    assert os.getpriority(os.PRIO_PROCESS, writer) == 15
    saver.close()
