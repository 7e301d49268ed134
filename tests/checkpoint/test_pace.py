"""The writer is slow only while somebody needs the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.checkpoint.commit import BESIDE_BYTES_PER_SECOND, BUSY_BYTES_PER_SECOND, _allowed
from tests.checkpoint.ground import about, as_tensor, open_saver, state, writers
from tests.processes import wait_until

# Root may write as often as it likes: the child gives that up. PR_SET_DUMPABLE: its /proc files are its own again.
ORDINARY = """
import ctypes, os, time
from buoy.machine.process import step_back
os.setsid()
try:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)
except PermissionError:
    pass  # an ordinary user already, or root without capabilities
for nice in (3, 4, 5):
    step_back(nice)  # comes back at once; its turn comes later
    deadline = time.monotonic() + 50
    while (now := open("/proc/self/autogroup").read().split()[-1]) != str(nice) and time.monotonic() < deadline:
        time.sleep(0.01)
    print(now, flush=True)
"""


def after_a_second(
    trainer: float | None, ours: float, idle: float | None, quota: float | None = None
) -> int | None:
    return _allowed((0.0, 0.0, 0.0, 0.0), (1.0, trainer, ours, idle), quota)


def test_a_trainer_that_waits_or_is_dead_is_not_slowed() -> None:
    assert after_a_second(0.01, 1.0, 0.5) is None
    assert after_a_second(None, 1.0, 0.0) is None


def test_a_trainer_on_all_cores_is_spared() -> None:
    assert after_a_second(1.9, 0.1, 0.0) == BUSY_BYTES_PER_SECOND
    # Its data-loading workers have the other core.
    assert after_a_second(1.0, 0.1, 0.1) == BUSY_BYTES_PER_SECOND


def test_beside_a_trainer_that_computes_a_core_that_nobody_uses_is_ours_but_not_all_of_the_memorys_speed() -> (
    None
):
    assert after_a_second(1.0, 0.9, 0.1) == BESIDE_BYTES_PER_SECOND
    assert after_a_second(1.0, 0.0, 1.0) == BESIDE_BYTES_PER_SECOND


def test_a_quota_counts_where_the_machine_has_more_cores() -> None:
    assert after_a_second(1.9, 0.1, 62.0, quota=2.0) == BUSY_BYTES_PER_SECOND
    assert after_a_second(1.0, 0.1, 62.0, quota=2.0) == BESIDE_BYTES_PER_SECOND


def test_what_cannot_be_read_makes_it_slow() -> None:
    assert after_a_second(1.0, 0.1, None) == BUSY_BYTES_PER_SECOND


def test_the_writer_steps_back_as_a_group_too(tmp_path: Path) -> None:
    """It is a session of its own, and the kernel weighs sessions against each other: nice alone means nothing then."""
    if not os.path.exists("/proc/self/autogroup"):
        pytest.skip("this kernel does not group processes by session")
    saver = open_saver(tmp_path)
    saver.save(state(1), about(1), as_tensor, wait=True)
    (writer,) = writers(tmp_path)
    group = Path(f"/proc/{writer}/autogroup")
    wait_until(lambda: group.read_text().split()[-1] == "15", "the kernel to take it")
    assert os.getpriority(os.PRIO_PROCESS, writer) == 15
    saver.close()


def test_an_ordinary_users_helper_steps_back_though_others_have_just_done_so() -> None:
    """One write per 100 ms is allowed for the whole machine: the second and the third come too early."""
    if not os.path.exists("/proc/self/autogroup"):
        pytest.skip("this kernel does not group processes by session")
    done = subprocess.run([sys.executable, "-c", ORDINARY], capture_output=True, text=True, timeout=400)

    assert done.stdout.split() == ["3", "4", "5"], done.stderr
