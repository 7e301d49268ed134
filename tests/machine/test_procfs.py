"""Readings of real processes: alive, dead, uncollected, renamed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buoy.machine import cgroup, procfs
from buoy.machine.threads import Activity, Look, threads_of

Tree = Callable[[str], str]
GONE = 2**22 + 1  # above the largest pid Linux gives


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start Python code that prints a line when it is ready; ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def wait_until_dead(pidfd: int) -> None:
    """A pidfd becomes readable when the process has ended, collected or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(10_000)


def test_a_running_process_can_be_read(python: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = python("x = bytearray(32 << 20); print(); input()")
    reader = procfs.ProcessReader(child.pid)
    stat, rss = reader.stat(), reader.rss()

    assert stat is not None
    assert (stat.ppid, stat.threads) == (os.getpid(), 1)
    assert stat.state in "SRD"
    assert rss is not None
    assert rss > 32 << 20
    assert (procfs.process_memory(child.pid) or 0) > 32 << 20
    assert procfs.process_memory(GONE) is None


def test_a_process_that_is_gone_reads_as_none(python: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = python("print(); input()")
    reader = procfs.ProcessReader(child.pid)
    child.communicate(b"\n")

    assert reader.stat() is None
    assert reader.rss() is None
    reader.close()
    reader.close()
    assert procfs.zombie_status(child.pid) is None
    assert procfs.process_name(GONE) == ""
    assert procfs.descendants(GONE) == []
    assert procfs.cpu_limits(GONE) == (None, None)
    assert procfs.io_bytes(GONE) is None
    assert threads_of(GONE) == []
    assert procfs.handles_signal(GONE, signal.SIGTERM) is False


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("import os; os._exit(0)", 0),
        ("import os; os._exit(137)", 137 << 8),
        ("import os; os.kill(os.getpid(), 9)", 9),
        ("import os; os.kill(os.getpid(), 15)", 15),
    ],
)
def test_an_uncollected_process_shows_its_status(ending: str, status: int) -> None:
    """`os._exit(137)` and a SIGKILL are told apart."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", ending])
    pidfd = os.pidfd_open(child.pid)
    wait_until_dead(pidfd)

    assert procfs.zombie_status(child.pid) == status
    child.wait()
    assert procfs.zombie_status(child.pid) is None
    collected = procfs.pidfd_exit_status(pidfd)
    os.close(pidfd)
    if collected is None and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15):
        pytest.skip("a kernel before 6.15 forgets the status of a collected process")
    assert collected == status


def test_a_main_thread_that_left_is_not_a_dead_process(
    python: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """Linux shows it as a zombie with status 0, yet its threads work on."""
    child = python(
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.readline).start();"
        "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    )
    reader = procfs.ProcessReader(child.pid)
    for _ in range(500):
        stat = reader.stat()
        if stat is not None and stat.state == "Z":
            break
        select.select([], [], [], 0.01)

    assert stat is not None
    assert (stat.state, stat.threads) == ("Z", 2)
    assert procfs.zombie_status(child.pid) is None


def test_a_zero_status_is_believed_only_where_we_may_look(tree: Tree) -> None:
    """Without the right to inspect a process the kernel writes 0, which would pass for a clean exit."""
    root = tree("kubernetes")
    stat = Path(root, "proc/700/stat")
    stat.write_text(stat.read_text().replace(") S ", ") Z "))
    assert procfs.zombie_status(700, root) is None

    link = Path(root, "proc/700/ns/pid")
    link.parent.mkdir()
    link.symlink_to("pid:[4026531836]")
    assert procfs.zombie_status(700, root) == 0


def test_a_pidfd_of_a_living_process_has_no_status() -> None:
    pidfd = os.pidfd_open(os.getpid())

    assert procfs.pidfd_exit_status(pidfd) is None
    os.close(pidfd)
    assert procfs.pidfd_exit_status(-1) is None


def test_descendants_reach_grandchildren_also_of_other_threads(
    python: Callable[..., subprocess.Popen[bytes]],
) -> None:
    child = python(
        "import os, subprocess, sys, threading\n"
        'code = \'import subprocess, sys; p = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"],'
        " stdin=subprocess.PIPE); print(p.pid, flush=True); input()'\n"
        "def work():\n"
        "    global inner\n"
        "    inner = subprocess.Popen([sys.executable, '-I', '-S', '-c', code], stdin=subprocess.PIPE,"
        " stdout=subprocess.PIPE)\n"
        "    grandchild = inner.stdout.readline()\n"
        "    print(flush=True); print(inner.pid, int(grandchild), flush=True); sys.stdin.readline()\n"
        "threading.Thread(target=work).start()\n"
    )
    assert child.stdout is not None
    expected = [int(word) for word in child.stdout.readline().split()]

    assert procfs.descendants(child.pid) == expected
    assert procfs._descendants_by_parent(child.pid, "/") == expected


def test_names_are_short_and_readable(python: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(flush=True); input()")
    child = subprocess.Popen(
        [sys.executable, "-u", str(script), "--token", "secret"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    name = procfs.process_name(child.pid)
    child.communicate(b"\n")
    renamed = python(
        "import ctypes; ctypes.CDLL(None).prctl(15, b'pt_data_worker', 0, 0, 0); print(flush=True); input()"
    )

    assert name == f"{Path(sys.executable).name} train.py"
    assert procfs.process_name(renamed.pid) == "pt_data_worker"


def test_a_module_is_named_by_its_module(tree: Tree) -> None:
    assert procfs.process_name(700, tree("colab")) == "python3 -m ipykernel_launcher"


def test_a_name_with_parentheses_and_blanks_does_not_shift_the_fields() -> None:
    line = Path("/proc/self/stat").read_bytes()
    odd = line[: line.index(b"(")] + b"(a) R 1 (b)" + line[line.rindex(b")") + 1 :]
    plain, tricky = procfs.parse_stat(line), procfs.parse_stat(odd)

    assert plain is not None
    assert tricky is not None
    assert (tricky.ppid, tricky.start_ticks) == (plain.ppid, plain.start_ticks)
    assert procfs.parse_stat(line[:-1]) is None  # cut short


def test_cpu_limits_are_read_from_the_process() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 200)); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    limits = procfs.cpu_limits(child.pid)
    child.communicate(b"\n")

    assert limits == (100, 200)


def test_storage_bytes_grow_with_what_is_written(tmp_path: Path) -> None:
    before = procfs.io_bytes(os.getpid())
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = procfs.io_bytes(os.getpid())

    if before is None or after is None:
        pytest.skip("this kernel does not account storage per process")
    if procfs.read_bytes("/proc/self/mountinfo") and after[1] == before[1]:
        pytest.skip("the temporary folder is not on storage")
    assert after[1] - before[1] >= 1 << 20


def test_a_handler_is_seen_before_a_signal_is_sent(python: Callable[..., subprocess.Popen[bytes]]) -> None:
    number = int(signal.SIGRTMIN) + 5
    without = python("print(flush=True); input()")
    catching = python(f"import signal; signal.signal({number}, lambda *a: None); print(flush=True); input()")

    assert procfs.handles_signal(without.pid, number) is False
    assert procfs.handles_signal(catching.pid, number) is True


def test_threads_are_listed_with_what_they_wait_for(python: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = python(
        "import sys, threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start();"
        "print(flush=True); sys.stdin.readline()"
    )
    threads = threads_of(child.pid)

    assert len(threads) == 2
    assert threads[0].tid == child.pid
    assert {thread.state for thread in threads} <= {"S", "R", "D"}
    assert threads[0].ran and threads[0].slices
    assert len(threads_of(child.pid, most=1)) == 1


def test_a_thread_without_a_cpu_is_known_by_its_delay_under_either_version_of_cgroups(tree: Tree) -> None:
    """A container of version 2 on a kernel that is not ours; the numbers are those of a real one at 1 % of a core."""
    root = tree("kubernetes")
    before = Look(10.0, [700], 700, root)
    schedstat = Path(root) / "proc/700/task/700/schedstat"
    schedstat.write_text("535377852 2007399082 51\n")
    after = Activity(before, Look(11.1, [700], 700, root))
    schedstat.write_text("524286831 918502702 45\n")
    throttled = Activity(before, Look(11.1, [700], 700, root))
    group = cgroup.find(700, root)

    assert after.delayed == pytest.approx(0.99, abs=0.01) and after.cores == pytest.approx(0.01, abs=0.002)
    assert throttled.delayed == 1.0  # it has not run at all, and is not counted until it does: its state is R
    assert group is not None and group.cpu_quota() == 1.5


def test_a_file_kept_open_shows_each_new_content(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text("1")
    reader = procfs.FileReader(str(path))
    first = reader.read()
    path.write_text("22")

    assert (first, reader.read()) == (b"1", b"22")
    reader.close()
    assert reader.read() == b""
    assert procfs.FileReader(str(tmp_path / "none")).read() == b""
