"""Attempts without a death record: lost with the recorder or the machine, or still alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import DIED_WALL, GIB, PID, Attempt

from buoy.flight.attempt import find_attempt
from buoy.machine import host, procfs
from buoy.verdict.evidence import load
from buoy.verdict.judge import judge
from buoy.view.runs import describe
from buoy.view.top import lines, may_change, state


def said(attempt: Attempt) -> tuple[str, str]:
    verdict = attempt.verdict()
    return verdict.cause.id, verdict.cause.claim.grade


def test_a_process_that_is_gone_with_its_recorder(attempt: Attempt) -> None:
    attempt.death = None

    assert said(attempt) == ("recorder-lost", "certain")
    assert attempt.verdict().wall is None


def test_the_parents_status_is_kept_when_the_recorder_is_lost(attempt: Attempt) -> None:
    attempt.death = None
    attempt.exit = {"t": 1600.0, "wall": DIED_WALL, "pid": PID, "status": 9}
    verdict = attempt.verdict()

    assert verdict.cause.id == "recorder-lost"
    assert verdict.mechanism.text == "signal 9 (SIGKILL)"


def test_a_recorder_that_stopped_with_it(attempt: Attempt) -> None:
    attempt.death = None
    cause = attempt.verdict().cause

    assert [claim.text for claim in cause.cascade] == [
        "the recorder stopped at the same time, within seconds"
    ]
    assert any("both died together" in step for step in cause.next)


@pytest.mark.parametrize("has_parent", [True, False])
def test_a_recorder_that_stopped_before_it_was_not_lost_with_it(attempt: Attempt, has_parent: bool) -> None:
    """By the parent's clock at the end, or by the steps that were counted after the last reading."""
    attempt.death = None
    if has_parent:
        attempt.exit = {"t": 1600.0, "wall": DIED_WALL, "pid": PID, "status": 9}
    for row in attempt.samples:
        row["t"] -= 40.0
    cause = attempt.verdict().cause
    told = " ".join([cause.claim.text, *(claim.text for claim in cause.cascade), *cause.next])

    assert "the recorder had stopped before it" in told
    assert "nothing was recorded in its last 40 s" in told
    assert "with it" not in cause.claim.text and "together" not in told


def test_which_stopped_first_is_not_said_where_no_step_tells_it(attempt: Attempt) -> None:
    attempt.death = None
    for row in attempt.samples:
        row["t"] += 300.0  # long after its last step
    cause = attempt.verdict().cause

    assert cause.cascade == ()
    assert not any("together" in step for step in cause.next)


def test_memory_that_was_nearly_full_is_a_possibility_only(attempt: Attempt) -> None:
    attempt.death = None
    attempt.samples[-1]["cgroup_used"] = int(1.95 * GIB)

    assert attempt.verdict().cause.actor.grade == "possible"


def test_another_boot_of_the_same_host_lost_it_for_certain(attempt: Attempt) -> None:
    attempt.death = None
    attempt.attempt["boot_id"] = "00000000-0000-0000-0000-000000000000"

    assert said(attempt) == ("machine-lost", "certain")


def test_another_first_process_likely_means_another_container(attempt: Attempt) -> None:
    """Not certain: two containers of a pod share host name and boot."""
    attempt.death = None
    attempt.attempt["pid1_start"] = 1

    assert said(attempt) == ("machine-lost", "likely")


def test_a_record_that_still_grew_a_moment_ago_makes_no_reboot_certain(attempt: Attempt) -> None:
    attempt.death = None
    attempt.attempt["boot_id"] = "00000000-0000-0000-0000-000000000000"
    for row in attempt.samples:
        row["wall"] = time.time()

    assert said(attempt) == ("machine-lost", "likely")


def test_a_process_in_a_container_is_seen_from_outside(attempt: Attempt) -> None:
    """The container has its own pids and its own first process; the start time is the same everywhere."""
    if host.initial_pid_namespace() is not True:
        pytest.skip("this test itself runs inside a PID namespace")
    command = ["unshare", "--pid", "--fork", "--kill-child", "sleep", "30"]
    outer = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        inner = child_of(outer.pid)
        if inner is None:
            pytest.skip("no PID namespace can be made here")
        attempt.attempt.update(pid=1, pid1_start=1, start_ticks=start_of(inner), initial_pid_namespace=False)
        attempt.death = None

        assert said(attempt) == ("still-running", "certain")
    finally:
        outer.kill()
        outer.wait()
    deadline = time.monotonic() + 5.0
    while start_of(inner) is not None and time.monotonic() < deadline:
        time.sleep(0.02)

    assert said(attempt)[0] == "machine-lost"


def start_of(pid: int) -> int | None:
    stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{pid}/stat"))
    return stat.start_ticks if stat is not None and stat.state != "Z" else None


def child_of(pid: int) -> int | None:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for child in procfs.descendants(pid):
            if procfs.read_bytes(f"/proc/{child}/cmdline").startswith(b"sleep"):
                return child
        time.sleep(0.02)
    return None


def test_on_another_host_the_first_may_yet_live(attempt: Attempt) -> None:
    """The folder is read from a laptop, through a mounted drive."""
    attempt.death = None
    attempt.attempt.update(hostname="elsewhere", boot_id="00000000-0000-0000-0000-000000000000")
    for row in attempt.samples:
        row["wall"] = time.time() - 7200.0
    assert said(attempt) == ("machine-lost", "likely")

    for row in attempt.samples:
        row["wall"] = time.time() - 20.0
    assert said(attempt) == ("unknown", "possible")


@pytest.mark.parametrize("age", [5.0, 7200.0])
def test_top_and_runs_say_that_another_machines_process_cannot_be_seen(attempt: Attempt, age: float) -> None:
    """However young its last reading: a clock may be wrong, and a copy does not grow."""
    attempt.death = None
    attempt.attempt.update(hostname="elsewhere", boot_id="00000000-0000-0000-0000-000000000000")
    for row in attempt.samples:
        row["wall"] = time.time() - age
    run = str(attempt.write().parents[1])
    now = state(find_attempt(run))
    told = "\n".join(lines(now))

    assert now["status"] == describe(run)["status"] == "not seen from here"
    assert "recorded on another machine: whether it is still alive cannot be seen from here" in told
    assert f"its last reading is {'5' if age == 5.0 else '2 h'}" in told
    assert may_change(now) is (age == 5.0)  # a mounted folder is followed as long as it grows


def test_what_another_boot_has_ended_for_certain_is_not_called_unseen(attempt: Attempt) -> None:
    attempt.death = None
    attempt.attempt["boot_id"] = "00000000-0000-0000-0000-000000000000"
    run = str(attempt.write().parents[1])

    assert state(find_attempt(run))["status"] == describe(run)["status"] == "machine-lost"


def test_a_machine_lost_at_the_time_limit(attempt: Attempt) -> None:
    attempt.death = None
    attempt.attempt.update(boot_id="00000000-0000-0000-0000-000000000000", time_limit=605.0)

    assert said(attempt) == ("time-limit", "likely")


def test_a_recorded_death_is_a_death_on_any_machine(attempt: Attempt) -> None:
    attempt.attempt["boot_id"] = "00000000-0000-0000-0000-000000000000"

    assert said(attempt) == ("killed", "certain")


def test_a_living_process(attempt: Attempt) -> None:
    attempt.alive()

    assert said(attempt) == ("still-running", "certain")
    assert attempt.verdict().wall is None


def test_a_pid_that_was_given_to_another_process_is_not_alive(attempt: Attempt) -> None:
    attempt.alive()
    attempt.attempt["start_ticks"] = 1

    assert said(attempt)[0] == "recorder-lost"


def test_a_process_younger_than_the_attempt_is_another(attempt: Attempt) -> None:
    attempt.alive()
    attempt.attempt["t"] = time.monotonic() - 10 * 86400.0

    assert said(attempt)[0] == "recorder-lost"


def hang(attempt: Attempt, stack: str = "", **values: object) -> None:
    attempt.alive()
    attempt.process(os.getpid(), stacks=(stack, 0.0))
    usual = {
        "step": 120,
        "age": 45.0,
        "cpu_share": 0.0,
        "threads": [],
        "state": "blocked",
        "is_certain": True,
    }
    attempt.event("hang", **{**usual, "phase": "train", "is_quiet": False, **values})


RECV = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/socket.py", line 7 in recv\n'


def test_a_hang_that_the_threads_prove_is_certain_and_its_reason_likely(attempt: Attempt) -> None:
    hang(
        attempt,
        RECV + '  File "/home/me/train.py", line 9 in fetch\n',
        waits="waits for a lock or another thread",
    )
    verdict = attempt.verdict()

    assert said(attempt) == ("hang", "certain")
    assert "step 120" in verdict.cause.claim.text
    assert verdict.cause.actor.grade == "likely"
    assert "waits for a lock or another thread, in /home/me/train.py:9" in verdict.cause.actor.text


@pytest.mark.parametrize(
    ("values", "cause", "grade", "words"),
    [
        ({"is_certain": False, "waits": "waits for the network"}, "hang", "likely", "It seems to hang"),
        ({"is_certain": False, "state": "waiting"}, "hang", "possible", "It may hang, or wait"),
        ({"state": "starved", "delayed": 0.97, "quota": 0.01}, "starved", "certain", "It is starved of CPU"),
        ({"state": "network", "network": 200e3}, "waiting", "certain", "It waits for the network (195.3 KiB come"),
        ({"is_certain": False, "state": "disk", "waits": "is writing to /drive/model.pt"}, "waiting", "likely",
         "It waits for a disk"),
        ({"is_certain": False, "state": "sleep"}, "waiting", "likely", "It sleeps"),
    ],
)  # fmt: skip
def test_what_is_not_proven_to_hang_is_called_what_it_is(
    attempt: Attempt, values: dict[str, object], cause: str, grade: str, words: str
) -> None:
    hang(attempt, **values)
    verdict = attempt.verdict()

    assert said(attempt) == (cause, grade)
    assert verdict.cause.claim.text.startswith(words)
    assert verdict.ran_for is not None and verdict.ran_for < 100.0  # it lives


def test_one_that_has_not_taken_a_step_is_still_starting(attempt: Attempt) -> None:
    """What it waits for is said, and that it hangs is not."""
    hang(attempt, step=0, phase="start", state="network", network=200e3, is_quiet=True)
    verdict = attempt.verdict()

    assert said(attempt) == ("still-running", "certain")
    assert "still starting" in verdict.cause.claim.text
    assert "195.3 KiB come and go each second" in verdict.cause.claim.evidence[0].text


def test_a_hang_that_an_older_buoy_recorded_is_no_proof(attempt: Attempt) -> None:
    hang(attempt, idle=True, state=None, is_certain=None)

    assert said(attempt) == ("hang", "likely")


def test_a_busy_hang_may_be_computing(attempt: Attempt) -> None:
    """It may as well be at a long evaluation: that no step came is certain, that it hangs is not."""
    hang(attempt, RECV.replace("recv", "work"), cpu_share=0.38, state="busy", is_certain=False)
    cause = attempt.verdict().cause

    assert (cause.id, cause.claim.grade) == ("hang", "possible")
    assert (cause.cascade[0].text, cause.cascade[0].grade) == ("no step since step 120", "certain")
    assert cause.actor.grade == "possible"
    assert "a long evaluation, or an endless loop" in cause.actor.text
    assert "blocked" not in str(attempt.verdict())
    assert cause.next[0].startswith("wait, if this is an evaluation")


def test_what_computed_without_a_step_is_not_said_to_have_hung(attempt: Attempt) -> None:
    attempt.event("hang", 5.0, step=120, age=45.0, cpu_share=0.9, threads=[], state="busy")

    assert "no step had come since step 120" in attempt.verdict().cause.cascade[0].text


def test_a_hanging_cell_is_interrupted_before_its_kernel_is_ended(attempt: Attempt) -> None:
    hang(attempt, RECV)
    attempt.attempt["command"] = ["python", "-m", "ipykernel_launcher", "-f", "kernel-1.json"]
    first, second, *_ = attempt.verdict().cause.next

    assert "interrupt the cell" in first
    assert "variables stay" in first
    assert "kill -TERM" in second
    assert "lost" in second


@pytest.mark.parametrize(
    ("values", "step", "word"),
    [
        ({}, 120, "hangs"),
        ({"state": "busy", "is_certain": False}, 120, "may hang"),
        ({"state": "starved"}, 120, "starved"),
        ({"state": "disk", "is_certain": False}, 120, "waits"),
        ({"state": "network", "is_quiet": True}, 120, "running"),
        ({}, 121, "running"),
    ],
)
def test_the_lists_of_runs_say_that_it_hangs(
    attempt: Attempt, values: dict[str, object], step: int, word: str
) -> None:
    """As long as no step came since: a recorder that is gone cannot call a hang over."""
    hang(attempt, **values)
    attempt.process(os.getpid(), step=step)
    for row in attempt.samples:
        row.update(step=step, wall=time.time())
    run = attempt.write().parent.parent

    assert describe(str(run))["status"] == word
    now = state(find_attempt(str(run)))
    assert now["status"] == word
    assert may_change(now)


def test_a_stopped_process_is_told_from_a_deadlock(attempt: Attempt) -> None:
    hang(attempt, state="stopped", threads=[{"tid": 1, "state": "T", "wchan": ""}])

    assert "SIGSTOP" in attempt.verdict().cause.actor.text


def test_a_hang_that_is_over_leaves_it_running(attempt: Attempt) -> None:
    hang(attempt)
    attempt.event("hang-over", step=121)

    assert said(attempt)[0] == "still-running"


def test_thrashing_of_a_living_process(attempt: Attempt) -> None:
    attempt.alive()
    attempt.event("warning", alarm="thrashing", text="steps take 8x as long, 900 major faults/s", values={})
    attempt.events[-1]["t"] = attempt.samples[-1]["t"]

    assert said(attempt) == ("thrashing", "likely")


def test_an_empty_folder_says_that_there_is_nothing(attempt: Attempt) -> None:
    from buoy.verdict.evidence import load
    from buoy.verdict.judge import judge

    verdict = judge(load(str(attempt.folder.parent)))

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("unknown", "possible")
    assert "no record" in verdict.cause.claim.text


def test_an_attempt_that_never_started_is_not_said_to_be_lost(attempt: Attempt) -> None:
    """attempt.json alone, or not even that: nothing shows that anything ran."""
    folder = attempt.write()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.name != "attempt.json":
            path.rmdir() if path.is_dir() else path.unlink()
    verdict = judge(load(str(folder)))
    assert (verdict.cause.id, verdict.cause.claim.grade) == ("unknown", "possible")
    assert "never started" in verdict.cause.claim.text

    (folder / "attempt.json").unlink()
    assert judge(load(str(folder))).cause.id == "unknown"


def test_a_stopped_process_is_said_to_be_stopped_with_the_way_out(attempt: Attempt) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        attempt.alive()
        attempt.attempt["pid"] = child.pid
        attempt.attempt["start_ticks"] = int(
            Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        )
        verdict = attempt.verdict()
        assert verdict.cause.id == "still-running"
        assert "stopped" in verdict.cause.claim.text
        assert f"`kill -CONT {child.pid}`" in verdict.cause.next[0]

        attempt.event("hang", step=3, age=30.0, cpu_share=0.0, threads=[])
        verdict = attempt.verdict()
        assert verdict.cause.id == "hang"
        assert verdict.cause.next == (f"`kill -CONT {child.pid}` resumes it; so does `fg` in the shell where "
                                      "Ctrl-Z stopped it",)  # fmt: skip
    finally:
        child.kill()
        child.wait()
