"""When a training counts as stuck, from step, CPU and I/O as the sidecar feeds them; and what its threads then prove.

The states are those of real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buoy.flight.alarms.stall import Hang, HangOver, StallWatch, _state, sentence, state_of
from buoy.machine import procfs
from buoy.machine.threads import Activity, Look
from tests.processes import wait_until


class Training:
    """A training as the watch sees it, one sample a second; without a look at threads, unless one is given."""

    def __init__(
        self,
        floor_seconds: float | None = None,
        step_seconds: float = 0.25,
        look: Callable[[], Look | None] | None = None,
    ) -> None:
        self.watch = StallWatch(floor_seconds, look)
        self.t, self.step, self.step_t, self.cpu, self.io = 1000.0, 0, 0.0, 0.0, 0.0
        self.step_seconds = step_seconds
        self.phase = "train"
        self.data_wait = 0.0
        self.readable = True

    def live(
        self,
        seconds: float,
        *,
        steps: bool = False,
        cpu: float = 0.0,
        io: float = 0.0,
        gpu: float | None = None,
    ) -> list[tuple[float, Hang | HangOver]]:
        """Go on for so many seconds; what was told, with its time from the beginning of this stretch."""
        told = []
        begun = self.t
        while self.t - begun < seconds:
            self.t += 1.0
            self.cpu += cpu
            self.io += io
            if steps:
                self.step += max(1, int(1 / self.step_seconds))
                self.step_t = self.t
            event = self.watch.feed(
                self.t, self.step, self.step_t, self.step_seconds, self.phase,
                self.cpu if self.readable else None, self.io if self.readable else None, gpu, self.data_wait,
            )  # fmt: skip
            if event is not None:
                told.append((self.t - begun, event))
        return told


def test_a_blocked_training_is_told_once_after_half_a_minute() -> None:
    training = Training()
    assert training.live(60, steps=True, cpu=1.0) == []

    told = training.live(600)

    [(after, hang)] = told
    assert isinstance(hang, Hang) and hang.state == "waiting"
    assert 30 <= after <= 35
    assert hang.step == training.step and hang.cpu_share == pytest.approx(0.0)


def test_slow_steps_stretch_the_patience() -> None:
    training = Training(step_seconds=10.0)
    training.step_seconds = 10.0
    training.live(30, steps=True, cpu=1.0)

    assert training.live(190) == []
    assert len(training.live(30)) == 1


def test_a_busy_pause_is_told_late_and_not_as_idle() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    assert training.live(290, cpu=1.0) == []
    [(_, hang)] = training.live(30, cpu=1.0)
    assert isinstance(hang, Hang) and hang.state == "busy"
    assert hang.cpu_share == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("phase", ["eval", "checkpoint"])
def test_a_marked_phase_is_given_four_times_as_long(phase: str) -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.phase = phase

    assert training.live(1190, cpu=1.0) == []
    assert len(training.live(30, cpu=1.0)) == 1


def test_reading_data_without_cpu_is_not_idle() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    assert training.live(250, io=10e6) == []


def test_a_busy_gpu_is_not_idle() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    assert training.live(250, gpu=95.0) == []


def test_a_blocked_training_that_shows_a_heartbeat_is_still_blocked() -> None:
    """A progress bar's thread uses a little CPU and writes a line now and then."""
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    [(_, hang)] = training.live(60, cpu=0.005, io=100)
    assert isinstance(hang, Hang) and hang.state == "waiting"


def test_a_block_after_a_long_busy_pause_is_told_from_when_it_blocked() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.live(200, cpu=1.0)

    [(after, hang)] = training.live(60)
    assert isinstance(hang, Hang) and hang.state == "waiting" and 30 <= after <= 40


def test_steps_that_come_again_end_the_hang_and_a_second_hang_is_told_again() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    assert len(training.live(60)) == 1

    [(_, over)] = training.live(30, steps=True, cpu=1.0)
    assert isinstance(over, HangOver) and over.step > 0
    [(after, hang)] = training.live(300)
    assert isinstance(hang, Hang) and after > 60  # it has come out of a minute's pause before


def test_a_pause_that_the_run_has_come_out_of_is_not_told_the_next_time() -> None:
    training = Training()
    for _ in range(3):
        training.live(60, steps=True, cpu=1.0)
        assert training.live(25) == []
    training.live(60, steps=True, cpu=1.0)

    assert training.live(36) == []


def test_before_the_first_step_only_idleness_counts_and_later() -> None:
    busy, idle = Training(), Training()
    busy.phase = idle.phase = "start"

    assert busy.live(3600, cpu=1.0) == []
    [(after, hang)] = idle.live(300)
    assert isinstance(hang, Hang) and hang.is_quiet and 120 <= after <= 125


def test_the_night_between_two_cells_is_no_pause_that_a_training_came_out_of() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.phase = "done"
    training.live(8 * 3600)
    training.phase = "train"
    training.live(60, steps=True, cpu=1.0)

    assert training.live(60)


def test_a_suspended_machine_is_no_hang() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.t += 36_000

    assert training.live(20) == []
    assert len(training.live(60)) == 1


def test_a_training_that_is_done_does_not_hang() -> None:
    """Also a notebook between two cells."""
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.phase = "done"

    assert training.live(4000) == []


def test_without_readings_a_stall_is_never_called_idle() -> None:
    training = Training()
    training.readable = False
    training.live(60, steps=True)

    assert training.live(290) == []
    [(_, hang)] = training.live(30)
    assert isinstance(hang, Hang) and hang.state == "busy" and hang.cpu_share is None


def test_the_impatient_set_every_floor() -> None:
    blocked, busy, before = Training(3.0, 0.01), Training(3.0, 0.01), Training(3.0)
    blocked.live(10, steps=True, cpu=1.0)
    busy.live(10, steps=True, cpu=1.0)

    assert blocked.live(6)
    assert busy.live(33, cpu=1.0)
    assert before.live(15)


def test_a_patience_that_was_asked_for_lengthens_every_floor_in_proportion() -> None:
    """Who sets 60 because 30 was too short does not want a busy evaluation to be called a hang after a minute."""
    training = Training(60.0)
    training.live(60, steps=True, cpu=1.0)

    assert training.live(590, cpu=1.0) == []
    assert len(training.live(20, cpu=1.0)) == 1


def test_batches_that_come_are_progress_though_no_step_does() -> None:
    """An evaluation that nobody marked, over a loader."""
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    for _ in range(60):
        training.data_wait += 0.001
        assert training.live(10, cpu=1.0) == []


def test_a_cell_that_has_not_trained_yet_is_before_its_first_step() -> None:
    """A plan, a plot or a download after a training, in a kernel that has counted steps before."""
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.phase = "start"

    assert training.live(3600, cpu=1.0) == []
    told = training.live(300)
    assert all(isinstance(hang, Hang) and hang.is_quiet for _, hang in told)


PROGRAMS = {
    # name: (code, state, whether that is certain)
    "takes a lock twice": (
        "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", "blocked", True,
    ),
    "two threads, each waits for the other's lock": (
        "import threading, time; a, b = threading.Lock(), threading.Lock()\n"
        "def take(first, second):\n"
        "    first.acquire(); time.sleep(0.2); second.acquire()\n"
        "threading.Thread(target=take, args=(a, b)).start(); take(b, a)",
        "blocked", True,
    ),
    "reads a pipe that nobody writes": ("import os; ends = os.pipe(); os.read(ends[0], 1)", "blocked", True),
    "waits for its own socket": ("import socket; a, b = socket.socketpair(); a.recv(1)", "blocked", True),
    "waits for a child that is stuck itself": (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import os; ends = os.pipe(); os.read(ends[0], 1)'])",
        "blocked", True,
    ),
    "a lock that a sleeping thread may free": (
        "import threading, time; lock = threading.Lock(); lock.acquire()\n"
        "threading.Thread(target=time.sleep, args=(600,)).start(); lock.acquire()",
        "blocked", False,
    ),
    "an alarm clock may end it": (
        "import signal, threading; signal.signal(signal.SIGALRM, lambda *a: 1 / 0); signal.alarm(600)\n"
        "lock = threading.Lock(); lock.acquire(); lock.acquire()",
        "blocked", False,
    ),
    "a lock with a time limit": (
        "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=600)", "waiting", False,
    ),
    "a pipe that somebody else holds": ("import sys; sys.stdin.read()", "blocked", False),
    "a peer that is silent": (
        "import socket; server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname()); client.recv(1)",
        "blocked", False,
    ),
    "receives 200 kB a second": (
        "import socket, threading, time; server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname()); peer, _ = server.accept()\n"
        "def send():\n"
        "    while True: peer.sendall(bytes(20_000)); time.sleep(0.1)\n"
        "threading.Thread(target=send, daemon=True).start()\n"
        "while True: client.recv(1 << 16)",
        "network", True,
    ),
    "another thread receives, the main one waits for a lock": (
        "import socket, threading, time; server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname()); peer, _ = server.accept()\n"
        "def send():\n"
        "    while True: peer.sendall(bytes(20_000)); time.sleep(0.1)\n"
        "def receive():\n"
        "    while True: client.recv(1 << 16)\n"
        "for each in (send, receive): threading.Thread(target=each, daemon=True).start()\n"
        "lock = threading.Lock(); lock.acquire(); lock.acquire()",
        "network", False,
    ),
    "an event that may come from anywhere": ("import os; os.eventfd_read(os.eventfd(0))", "blocked", False),
    "sleeps": ("import time; time.sleep(600)", "sleep", False),
    "looks for a file now and then": (
        "import os, time\nwhile not os.path.exists('/nonexistent'): time.sleep(0.1)", "sleep", False,
    ),
    "waits for a child that works": ("import subprocess; subprocess.run(['sleep', '600'])", "waiting", False),
    "is stopped": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "stopped", True),
}  # fmt: skip


@pytest.fixture
def make_frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system on which every write waits until it is thawed; skips in words where that is not allowed."""
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, mount]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot make a small file system here: {done.stderr.strip()}")
    subprocess.run(["fsfreeze", "-f", str(mount)], check=True)
    yield mount
    subprocess.run(["fsfreeze", "-u", str(mount)], check=False, capture_output=True)
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(scope="module")
def activities() -> Iterator[dict[str, Activity]]:
    """What each program did within a second, all of them looked at twice."""
    started = {
        name: subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
        for name, (code, _, _) in PROGRAMS.items()
    }
    try:
        time.sleep(3.0)
        before = {name: look(program.pid) for name, program in started.items()}
        time.sleep(1.0)
        yield {name: Activity(before[name], look(program.pid)) for name, program in started.items()}
    finally:
        for program in started.values():
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            assert program.stdin is not None
            program.stdin.close()


def look(pid: int) -> Look:
    return Look(time.monotonic(), [pid, *procfs.descendants(pid)], pid)


LESS_SEEN = {
    "reads a pipe that nobody writes": "blocked",
    "waits for its own socket": "blocked",
    "waits for a child that is stuck itself": "waiting",
}
"""What is said of these by an ordinary user, who does not see whether another process has the other end."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_threads_say_which_stall_it_is(activities: dict[str, Activity], name: str) -> None:
    """Certain only where nothing outside, and no clock, can end it."""
    _, state, is_certain = PROGRAMS[name]
    if name in LESS_SEEN and not os.access("/proc/1/fd", os.R_OK):
        state, is_certain = LESS_SEEN[name], False
    found = _state(activities[name], is_idle=True)
    hang = Hang(found, 60.0, 30.0, 0.0, 100, "train", 0.1, activities[name])

    assert (hang.state, hang.is_certain) == (state, is_certain)


@pytest.mark.parametrize("cores", [0.01, 0.05])
def test_a_program_that_computes_without_a_cpu_is_starved_and_not_blocked(
    make_quota: Callable[[float], Path], cores: float
) -> None:
    quota = make_quota(cores)
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (quota / "cgroup.procs").write_text(str(program.pid))
        time.sleep(0.5)
        before = look(program.pid)
        time.sleep(1.5)
        activity = Activity(before, look(program.pid))
    finally:
        program.kill()
        program.wait()

    assert _state(activity, is_idle=True) == _state(activity, is_idle=False) == "starved"
    assert activity.delayed is not None and activity.delayed > 0.7
    assert Hang("starved", 60.0, 30.0, cores, 0, "start", None, activity).is_quiet is False


@pytest.fixture
def starved(make_quota: Callable[[float], Path]) -> list[Look]:
    """Two looks at an endless loop that gets hardly any CPU."""
    quota = make_quota(0.02)
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (quota / "cgroup.procs").write_text(str(program.pid))
        looks = [look(program.pid)]
        time.sleep(1.5)
        looks.append(look(program.pid))
    finally:
        program.kill()
        program.wait()
    return looks


@pytest.mark.parametrize("step_seconds", [1.0, 0.25])
def test_an_endless_loop_on_a_crowded_machine_is_not_surely_starved(
    starved: list[Look], step_seconds: float
) -> None:
    """It gets 0.6 s of CPU and makes no step: too little for a step of 1 s, enough for two of 0.25 s."""
    training = Training(step_seconds=step_seconds, look=lambda: starved.pop(0))
    training.live(60, steps=True, cpu=1.0)

    [(_, hang)] = training.live(40, cpu=0.02)
    assert isinstance(hang, Hang) and (hang.state, hang.is_certain) == ("starved", step_seconds == 1.0)


def test_where_a_step_takes_less_cpu_than_can_be_read_nothing_is_surely_starved(starved: list[Look]) -> None:
    """Steps that sleep for most of their time: the loop after them had the CPU of many, and it reads as 0.03 s."""
    training = Training(floor_seconds=0.5, step_seconds=0.0155, look=lambda: starved.pop(0))
    training.live(3, steps=True, cpu=0.0)

    [(_, hang)] = training.live(3, cpu=0.01)
    assert isinstance(hang, Hang) and (hang.state, hang.is_certain) == ("starved", False)


def test_one_costly_step_does_not_make_an_endless_loop_surely_starved(starved: list[Look]) -> None:
    training = Training(step_seconds=1.0, look=lambda: starved.pop(0))
    training.live(10, steps=True, cpu=0.1)
    training.live(1, steps=True, cpu=30.0)
    training.live(10, steps=True, cpu=0.1)

    [(_, hang)] = training.live(40, cpu=0.02)
    assert isinstance(hang, Hang) and (hang.state, hang.is_certain) == ("starved", False)


def test_cpu_time_right_after_a_step_counts_too(starved: list[Look]) -> None:
    """The loop began in the second of the last step, when the machine was not crowded yet."""
    training = Training(step_seconds=1.0, look=lambda: starved.pop(0))
    training.live(60, steps=True, cpu=0.7)
    training.live(1, steps=True, cpu=1.0)

    [(_, hang)] = training.live(40, cpu=0.02)
    assert isinstance(hang, Hang) and (hang.state, hang.is_certain) == ("starved", False)


def test_a_save_that_a_disk_does_not_take_is_no_hang(make_frozen_disk: Path) -> None:
    """The file system is frozen, as a snapshot or a mounted drive that lost its connection freezes it."""
    code = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), bytes(1 << 20))"
    program = subprocess.Popen([sys.executable, "-c", code, str(make_frozen_disk / "model.pt")])
    try:
        wait_until(
            lambda: _state(Activity(look(program.pid), look(program.pid)), is_idle=True) == "disk",
            "the write",
        )
        before = look(program.pid)
        time.sleep(1.0)
        activity = Activity(before, look(program.pid))
    finally:
        program.kill()
        subprocess.run(["fsfreeze", "-u", str(make_frozen_disk)], check=False)
        program.wait()

    assert _state(activity, is_idle=True) == "disk"
    assert activity.wait is not None


def test_what_the_kernel_hides_is_never_certain(tmp_path: Path) -> None:
    """Another user's view, or Yama's: `syscall` cannot be read, so nobody knows of a time limit."""
    task = tmp_path / "proc" / "7" / "task" / "7"
    task.mkdir(parents=True)
    (tmp_path / "proc" / "7" / "status").write_text("SigCgt:\t0000000000000000\n")
    (task / "stat").write_text("7 (python) S 1 7 7 0 -1 4194304 " + "0 " * 44 + "\n")
    (task / "schedstat").write_text("8766889 0 1\n")
    (task / "wchan").write_text("futex_wait_queue")
    looks = [Look(float(t), [7], 7, str(tmp_path)) for t in (0, 2)]
    activity = Activity(*looks)
    hidden = Hang(_state(activity, is_idle=True), 60.0, 30.0, 0.0, 100, "train", 0.1, activity)
    (task / "syscall").write_text("202 0x1 0x189 0x0 0x0 0x0 0xffffffff 0x7fff 0x7fff\n")
    looks = [Look(float(t), [7], 7, str(tmp_path)) for t in (0, 2)]
    activity = Activity(*looks)
    shown = Hang(_state(activity, is_idle=True), 60.0, 30.0, 0.0, 100, "train", 0.1, activity)

    (task / "schedstat").write_text("0 0 0\n")
    activity = Activity(*[Look(float(t), [7], 7, str(tmp_path)) for t in (0, 2)])

    assert not activity.is_still and not activity.is_closed  # this kernel does not count
    assert (hidden.state, hidden.is_certain) == ("blocked", False)
    assert (shown.state, shown.is_certain) == ("blocked", os.uname().machine == "x86_64")


def test_what_will_come_is_waited_for_as_long_as_a_busy_one() -> None:
    """A slow download in the middle of a training; the look is at a real process."""
    code = PROGRAMS["sleeps"][0]
    program = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(
            lambda: _state(Activity(look(program.pid), look(program.pid)), is_idle=True) == "sleep", "it"
        )
        training = Training(look=lambda: look(program.pid))
        training.live(60, steps=True, cpu=1.0)
        early, late = training.live(290), training.live(40)
    finally:
        program.kill()
        program.wait()

    assert early == []
    [(_, hang)] = late
    assert isinstance(hang, Hang) and hang.state == "sleep"


def test_a_stall_that_becomes_another_is_told_again() -> None:
    """First nothing can be read of its threads; then it is seen to be blocked."""
    looks: list[Look | None] = [None, None]
    program = subprocess.Popen([sys.executable, "-c", PROGRAMS["takes a lock twice"][0]])
    try:
        wait_until(lambda: Activity(look(program.pid), look(program.pid)).is_closed, "the deadlock")
        training = Training(look=lambda: looks.pop() if looks else look(program.pid))
        training.live(60, steps=True, cpu=1.0)
        told = [hang for _, hang in training.live(200)]
    finally:
        program.kill()
        program.wait()

    assert [(hang.state, hang.is_certain) for hang in told if isinstance(hang, Hang)] == [
        ("waiting", False), ("blocked", True),
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["blocked", "starved", "network", "disk", "sleep", "waiting", "busy"])
@pytest.mark.parametrize("step", [0, 123_456_789])
def test_the_line_says_where_and_what_and_is_short(state: str, step: int) -> None:
    hang = Hang(state, 4000.0, 300.0, 1.98, step, "checkpoint", 123.456)
    hang.waits = "waits for data from a socket, pipe or process"
    if state == "disk":
        hang.waits = "is writing to /content/drive/MyDrive/a/long/way/down/to/the/model.pt"
    hang.network = 1e9
    line = sentence(hang)

    assert len(line) <= 200
    assert "1 h 6 min" in line and "checkpoint" in line and line.endswith(".")


def test_an_event_of_an_older_buoy_is_read_and_proves_nothing() -> None:
    assert state_of({"idle": True, "threads": [{"state": "S"}]}) == "blocked"
    assert state_of({"idle": False}) == "busy"
    assert state_of({"idle": True, "threads": [{"state": "T"}]}) == "stopped"


def test_a_stopped_process_is_told_how_it_goes_on_and_not_that_it_is_blocked() -> None:
    line = sentence(Hang("stopped", 31.0, 30.0, 0.0, 150, "train", 0.01), pid=77)

    assert "stopped" in line
    assert "`kill -CONT 77`" in line
    assert "blocked" not in line
