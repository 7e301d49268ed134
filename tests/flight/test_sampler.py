"""The sampler on real processes: whose beacon leads, and children that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from buoy.flight.beacon import Beacon
from buoy.flight.death import holders
from buoy.flight.log import FIELDS
from buoy.flight.sampler import Sampler
from buoy.machine import process
from tests.processes import event, wait_until


def beacon(folder: Path, pid: int) -> Beacon:
    (folder / f"process-{pid}").mkdir()
    return Beacon(str(folder / f"process-{pid}" / "beacon"))


def test_the_process_that_stepped_last_leads_not_the_one_with_most_steps(tmp_path: Path) -> None:
    """`sh -c 'python first.py; python second.py'`: the finished one must not look like a hang."""
    first, second = beacon(tmp_path, 111), beacon(tmp_path, 222)
    sampler = Sampler(os.getpid(), str(tmp_path), str(tmp_path))
    for _ in range(1000):
        first.step()
    before = dict(zip(FIELDS, sampler.sample(time.monotonic()), strict=True))
    second.step()
    after = dict(zip(FIELDS, sampler.sample(time.monotonic()), strict=True))

    assert (before["step"], after["step"]) == (1000, 1)


def test_a_child_is_met_with_the_next_sample_and_its_memory_is_counted(tmp_path: Path) -> None:
    sampler = Sampler(os.getpid(), str(tmp_path), str(tmp_path))
    sampler.sample(time.monotonic())
    child = subprocess.Popen([sys.executable, "-c", "import time; held = b'x' * (50 << 20); time.sleep(60)"])

    def tree_grew() -> bool:
        sample = dict(zip(FIELDS, sampler.sample(time.monotonic()), strict=True))
        return sample["tree_rss"] - sample["rss"] > 50 << 20

    try:
        sampler.sample(time.monotonic())
        met = child.pid in sampler.children
        wait_until(tree_grew, "the child's memory")
    finally:
        child.kill()
        child.wait()
    sampler.forget(child.pid)

    assert met
    assert child.pid not in sampler.children and child.pid not in sampler.rss


def test_every_field_has_a_value_or_none_and_the_common_ones_are_known(tmp_path: Path) -> None:
    sampler = Sampler(os.getpid(), str(tmp_path), str(tmp_path))
    sample = dict(zip(FIELDS, sampler.sample(time.monotonic()), strict=True))

    assert sample["rss"] > 1 << 20 and sample["processes"] >= 1 and sample["disk_free"] > 0
    assert sample["step"] is None and sample["gpu_used"] is None


_WITH_HELPERS = """
import os, subprocess, sys, time
from buoy.planner.stage import forked
from buoy.estimate.child import environment
held = "held = b'x' * (60 << 20); import time; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", held], env=environment())
worker = subprocess.Popen([sys.executable, "-c", held.replace("60 <<", "30 <<")])
print(worker.pid, flush=True)
forked([lambda: exec(held)], os.devnull, 60.0)
"""


def test_buoys_own_processes_are_no_part_of_the_trainings_memory_but_of_the_evidence(tmp_path: Path) -> None:
    """A plan is traced in a program of ours or in a fork of the training; a worker of the training counts."""
    training = subprocess.Popen(
        [sys.executable, "-c", _WITH_HELPERS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert training.stdout is not None
    worker = int(training.stdout.readline())
    sampler = Sampler(training.pid, str(tmp_path), str(tmp_path))
    sample: dict[str, int] = {}

    def all_hold() -> bool:
        sampler._slow_due = 0.0
        sample.update(zip(FIELDS, sampler.sample(time.monotonic()), strict=True))
        large = [pid for pid, rss in sampler.rss.items() if rss > 60 << 20]
        return len(sampler.helpers) == 2 and len(large) >= 2 and sampler.rss.get(worker, 0) > 30 << 20

    try:
        wait_until(all_hold, "two helpers and a worker")
        roles = {item["pid"]: item["role"] for item in holders(sampler)}
    finally:
        for pid in (*sampler.children, training.pid):
            os.kill(pid, signal.SIGKILL)
        training.wait()
        training.stdout.close()

    assert sample["tree_rss"] == sampler.rss[training.pid] + sampler.rss[worker]
    assert sample["processes"] == 4
    assert sorted(roles.values()) == ["buoy's own", "buoy's own", "child", "main"]


def test_what_buoy_starts_beside_a_training_is_known_as_its_own(tmp_path: Path) -> None:
    """Writer, mirror and sidecar are nobody's children: they are known by the file that Python was given."""
    script = tmp_path / "writer.py"
    script.write_text("import time; time.sleep(60)")
    own = Path(process.__file__).parents[1] / "supervisor" / "sidecar.py"
    training = subprocess.Popen(
        [sys.executable, "-c", "import buoy; buoy.watch('r'); input()"], cwd=tmp_path, stdin=subprocess.PIPE
    )
    other = subprocess.Popen([sys.executable, "-I", "-S", str(script), str(own)])
    try:
        start = wait_until(lambda: event(tmp_path / "r", "start"), "the sidecar")
        assert process.is_helper(start["sidecar"])
        assert not process.is_helper(other.pid) and not process.is_helper(training.pid)
    finally:
        other.kill()
        training.kill()
        other.wait()
        training.communicate()


def test_a_dead_child_that_nobody_collects_is_met_once(tmp_path: Path) -> None:
    """It stays listed as a child until its parent waits for it; a new child that gets its number would be met."""
    sampler = Sampler(os.getpid(), str(tmp_path), str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        sampler.sample(time.monotonic())
        met = child.pid in sampler.children
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        sampler.forget(child.pid)
        sampler._slow_due = 0.0
        sampler.sample(time.monotonic())
        sampler.sample(time.monotonic())

        assert met
        assert child.pid not in sampler.children
    finally:
        child.communicate()
    sampler._slow_due = 0.0
    sampler.sample(time.monotonic())

    assert not sampler._zombies
