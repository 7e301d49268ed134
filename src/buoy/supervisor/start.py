"""Starting to record: where the run goes, what is known at its start, and the sidecar's launch."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from buoy import __version__
from buoy.flight.attempt import ATTEMPT_SCHEMA, Attempt, is_kernel
from buoy.flight.privacy import mask_arguments
from buoy.machine import disk, host, procfs
from buoy.machine.files import open_new, write_json

_SIDECAR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sidecar.py")
_READY_SECONDS = 10.0
RESERVE_BYTES = 256 << 10
"""Kept on disk for the evidence: a disk that is full at the death still takes the verdict."""


def default_run_folder(command: list[str]) -> str:
    """`runs/<script>`: the same script resumes the same run.

    >>> default_run_folder(["python", "-u", "src/train.py", "--lr", "1"])
    'runs/train'
    >>> default_run_folder(["torchrun", "-m", "pkg.train"])
    'runs/train'
    """
    return os.path.join("runs", _script_name(command))


def _script_name(command: list[str]) -> str:
    module = None
    for position, word in enumerate(command):
        if word.endswith((".py", ".sh", ".ipynb")) and " " not in word and "\n" not in word:
            name = os.path.splitext(os.path.basename(word))[0]
            return "notebook" if is_kernel([name]) else _plain(name)
        if word == "-m" and module is None and position + 1 < len(command):
            module = command[position + 1].rpartition(".")[2]
    return _plain(module or os.path.basename(command[0]))


def _plain(name: str) -> str:
    return name.lstrip(".")[:80] or "run"


def log_home(mirror: str | None, received: str) -> str | None:
    """The folder that the log is copied to; a store is refused, as it would become a folder of that name."""
    if not mirror:
        return None  # and nothing is loaded for it
    from buoy.checkpoint.mirror.storage import place_of

    place = place_of(mirror)
    if "://" in place:
        from buoy.errors import UsageError

        raise UsageError(
            "an object store as the log's mirror",
            received=received,
            expected="a folder: the recorder needs no package, and stores need one",
            hint=f'`buoy.Run("runs/cats", mirror="{mirror}")` in the script copies checkpoints and log there',
        )
    return place


def describe_attempt(
    attempt: Attempt, mode: str, pid: int, command: list[str], mirror: str | None, time_limit: float | None
) -> dict[str, object]:
    """What is known at the start, as attempt.json holds it."""
    from buoy.machine.limits import read as read_limits
    from buoy.machine.limits import session_started as session_start

    limits = read_limits(pid, attempt.run_folder)
    seconds, source = limits.time_limit, limits.time_limit_source
    session_started = session_start() if seconds is not None else None
    if time_limit is not None:
        seconds, source, session_started = time_limit, "given", None
    found = procfs.stat_of(pid)
    return {
        "schema": ATTEMPT_SCHEMA,
        "number": attempt.number,
        "mode": mode,
        "pid": pid,
        "start_ticks": found.start_ticks if found else None,
        "command": mask_arguments(command),
        "cwd": os.getcwd(),
        "t": time.monotonic(),
        "wall": time.time(),
        "boot_id": host.boot_id(),
        "hostname": host.hostname(),
        "pid1_start": host.pid1_start(),
        "initial_pid_namespace": host.initial_pid_namespace(),
        "time_limit": seconds,
        "time_limit_source": source,
        "session_started": session_started or time.time(),
        "platform": limits.platform,
        "limits": limits.to_json(),
        "mirror": mirror,
        "mirror_mount": disk.mount_apart(mirror, attempt.run_folder) if mirror is not None else None,
        "buoy": __version__,
        "python": sys.version.split()[0],
        "kernel": host.kernel_release(),
    }


def write_attempt(description: dict[str, object], attempt: Attempt) -> None:
    """Put attempt.json and the reserve on disk."""
    write_json(os.path.join(attempt.folder, "attempt.json"), description)
    descriptor = open_new(os.path.join(attempt.folder, "reserve"))
    try:
        os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
    finally:
        os.close(descriptor)


def start_sidecar(attempt: Attempt, pid: int, *ours: int) -> int | None:
    """Start the sidecar for this process and wait until it has taken its first readings; its pid, or None.

    `ours` are further processes that belong to buoy and are no strangers in the cgroup.
    """
    if not sys.executable:
        return None
    reading, writing = os.pipe()
    try:
        launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", _SIDECAR, attempt.folder, str(pid), str(writing), *map(str, ours)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        writing = -1
        launcher.wait(_READY_SECONDS)  # it forks at once: the sidecar is nobody's child
        ready, _, _ = select.select([reading], [], [], _READY_SECONDS)
        answer = os.read(reading, 32) if ready else b""
        return int(answer) if answer.strip().isdigit() else None
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
