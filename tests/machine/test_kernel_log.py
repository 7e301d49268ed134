"""The kernel's words: only its own, only the telling ones."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from buoy.machine import kernel_log
from buoy.machine.kernel_log import KernelLog, parse_oom_kill, parse_segfault, parse_xid

KILL = (
    "Memory cgroup out of memory: Killed process 5989 (python3) total-vm:221356kB, anon-rss:61056kB, "
    "file-rss:6680kB, shmem-rss:0kB, UID:0 pgtables:188kB oom_score_adj:0"
)
CONTEXT = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/probeA,"
    "task_memcg=/probeA/b,task=python3,pid=5989,uid=0"
)


def wait_for_lines(log: KernelLog, most: float = 5.0) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    deadline = time.monotonic() + most
    while not lines and time.monotonic() < deadline:
        lines = log.read_new()
        time.sleep(0.02)
    return lines


def test_a_real_segfault_is_reported_with_its_pid() -> None:
    log = KernelLog()
    if not log.readable:
        pytest.skip(f"the kernel log cannot be read here: {log.reason}")
    crash = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import ctypes; ctypes.string_at(0)"])
    crash.wait()
    lines = [line for line in wait_for_lines(log) if f"[{crash.pid}]" in str(line["text"])]

    if not lines and Path("/proc/sys/debug/exception-trace").read_text().strip() != "1":
        pytest.skip("this kernel does not report faults")
    assert parse_segfault(str(lines[0]["text"])) is not None
    assert parse_segfault(str(lines[0]["text"]))["pid"] == crash.pid  # type: ignore[index]
    log.close()


def test_what_user_space_wrote_into_the_log_is_not_believed() -> None:
    """Anyone with the right to write there could frame the kernel."""
    log = KernelLog()
    if not log.readable:
        pytest.skip(f"the kernel log cannot be read here: {log.reason}")
    try:
        Path("/dev/kmsg").write_text("<4>Out of memory: Killed process 1 (buoy-test) total-vm:1kB\n")
    except OSError as error:
        pytest.skip(f"the kernel log cannot be written here: {error}")
    time.sleep(0.1)

    assert not [line for line in log.read_new() if "buoy-test" in str(line["text"])]
    log.close()


def test_only_telling_lines_since_the_start_without_control_bytes(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"4,1,1000000,-;{KILL}\n")
    log = KernelLog(str(path))
    with path.open("a") as file:
        file.write("6,2,2000000,-;usb 1-1: new device\n SUBSYSTEM=usb\n")
        file.write("4,3,3500000,-;NVRM: Xid (PCI:0000:00:04): 79,\x1b[31m pid=7\n")
        file.write("12,4,3600000,-;Killed process 1 (said by user space)\n")
        file.write("garbage;Killed process\n,,,;Out of memory\n")

    assert log.read_new() == [{"t": 3.5, "text": "NVRM: Xid (PCI:0000:00:04): 79, [31m pid=7"}]
    assert log.read_new() == []
    log.close()
    assert log.read_new() == []


def test_a_log_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "kmsg"))

    assert log.readable is False
    assert log.reason == f"there is no {tmp_path}/kmsg here (usual in a container)"
    assert log.read_new() == []


def test_a_flood_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(str(path))
    with path.open("a") as file:
        file.writelines(f"4,{n},{n},-;I/O error, dev sda, sector {n}\n" for n in range(20_000))

    assert 0 < len(log.read_new()) < 1000
    log.close()


def test_an_oom_kill_names_the_victim_and_its_sizes() -> None:
    assert parse_oom_kill(KILL) == {
        "pid": 5989,
        "name": "python3",
        "total_vm": 221356 * 1024,
        "anon_rss": 61056 * 1024,
        "file_rss": 6680 * 1024,
        "shmem_rss": 0,
        "pgtables": 188 * 1024,
    }


def test_the_oom_context_names_the_groups() -> None:
    assert parse_oom_kill(CONTEXT) == {
        "pid": 5989,
        "name": "python3",
        "constraint": "CONSTRAINT_MEMCG",
        "memcg": "/probeA",
        "task_memcg": "/probeA/b",
    }


def test_a_process_cannot_frame_another_by_its_name() -> None:
    """Names are the process's own choice: the pid is taken from the kernel's place for it."""
    framed = KILL.replace("(python3)", "(1) total-vm:0k)")
    sly = CONTEXT.replace("task=python3", "task=a,pid=1,uid=")

    assert parse_oom_kill(framed) is not None
    assert parse_oom_kill(framed)["pid"] == 5989  # type: ignore[index]
    assert parse_oom_kill(sly) is not None
    assert parse_oom_kill(sly)["pid"] == 5989  # type: ignore[index]
    assert parse_segfault("a[1]: b[42]: segfault at 0 ip 0") == {"pid": 42, "name": "a[1]: b"}


def test_traps_name_the_process() -> None:
    line = "traps: python3[77] general protection fault ip:7f sp:7f error:0 in libtorch.so[7f+1]"

    assert parse_segfault(line) == {"pid": 77, "name": "python3"}


def test_an_xid_without_a_process_still_has_its_number() -> None:
    line = "NVRM: Xid (PCI:0000:00:04): 31, pid='<unknown>', name=<unknown>, Ch 00000008"

    assert parse_xid(line) == {"xid": 31, "device": "PCI:0000:00:04"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Killed process",
        "Killed process x (y) total-vm:1kB",
        "oom-kill:",
        "oom-kill:pid=1",
        "traps: ",
        "[1]",
    ],
)
def test_other_lines_parse_to_nothing(text: str) -> None:
    assert parse_oom_kill(text) is None
    assert parse_segfault(text) is None
    assert parse_xid(text) is None


def test_every_kind_of_line_the_parsers_know_is_let_through(tmp_path: Path) -> None:
    for text in (KILL, CONTEXT, "python3[1]: segfault at 0", "traps: a[1] trap", "NVRM: Xid (x): 1"):
        assert kernel_log._parse_record(f"4,1,1,-;{text}") == {"t": 1e-06, "text": text}
