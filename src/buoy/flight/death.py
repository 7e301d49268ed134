"""The evidence of a death, gathered by the sidecar in the milliseconds after it; also how the parent process ended."""

from __future__ import annotations

import os
import time

from buoy.flight.privacy import mask_text
from buoy.flight.sampler import Sampler
from buoy.machine import disk, process, procfs
from buoy.machine.cgroup import ColabEvents
from buoy.machine.files import read_json
from buoy.machine.kernel_log import KernelLog

SCHEMA = "buoy.death/1"
_PARENT_SECONDS = 0.06
"""How long the supervising parent may take to write the exact status before we go on without it."""
_PIDFD_SECONDS = 0.04
_HOLDERS_MOST = 8
_SHM = "/dev/shm"  # noqa: S108 - only its free space is read


def exit_status(
    pid: int, pidfd: int, folder: str | None = None, patience: float = _PIDFD_SECONDS
) -> tuple[int | None, str | None]:
    """The raw wait status and where it was read.

    The parent's word is exact (`buoy run`). Without it: the zombie that a slow parent has not reaped yet, or, from
    Linux 6.15 on, the pidfd.
    """
    zombie = procfs.zombie_status(pid)
    if folder is not None:
        deadline = time.monotonic() + _PARENT_SECONDS
        while time.monotonic() < deadline:
            told = read_json(os.path.join(folder, "exit.json"))
            if told is not None and isinstance(told.get("status"), int):
                return told["status"], "wait4"
            time.sleep(0.002)
    if zombie is not None:
        return zombie, "zombie"
    deadline = time.monotonic() + patience
    while True:  # the pidfd knows only once the parent has reaped
        status = procfs.pidfd_exit_status(pidfd)
        if status is None:
            status, source = procfs.zombie_status(pid), "zombie"
        else:
            source = "pidfd"
        if status is not None:
            return status, source
        if time.monotonic() > deadline:
            return None, None
        time.sleep(0.002)


def counter_change(before: dict, after: dict) -> dict[str, object]:  # type: ignore[type-arg]
    """OOM-kill counters as before and after; None where one of the two could not be read."""

    def change(first: dict | None, then: dict | None) -> dict[str, object] | None:  # type: ignore[type-arg]
        if not first or not then or first["value"] is None or then["value"] is None:
            return None
        return {"path": then["path"], "before": first["value"], "after": then["value"]}

    first_parents = {parent["path"]: parent for parent in before["cgroup_parents"]}
    parents = [change(first_parents.get(parent["path"]), parent) for parent in after["cgroup_parents"]]
    readable = before["host"] is not None and after["host"] is not None
    return {
        "cgroup": change(before["cgroup"], after["cgroup"]),
        "cgroup_parents": [parent for parent in parents if parent is not None],
        "host": {"before": before["host"], "after": after["host"]} if readable else None,
    }


def gather(
    sampler: Sampler,
    pidfd: int,
    attempt: dict,  # type: ignore[type-arg]
    folder: str,
    before: dict,  # type: ignore[type-arg]
    kernel_log: KernelLog,
    kernel_lines: list,  # type: ignore[type-arg]
    colab: ColabEvents,
    last_sample: float | None,
    longest_gap: float,
) -> dict[str, object]:
    """death.json: see docs/flight-log.md."""
    died, wall = time.monotonic(), time.time()
    soft_before, _ = sampler.cpu_limits
    sampler.read_main()
    status, source = exit_status(sampler.pid, pidfd, folder if attempt.get("mode") == "run" else None)
    kernel_lines.extend(kernel_log.read_new())
    soft, hard = sampler.cpu_limits
    return {
        "schema": SCHEMA,
        "t": died,
        "wall": wall,
        "pid": sampler.pid,
        "status": {"raw": status, "source": source},
        "counters": counter_change(before, sampler.counters()),
        "cgroup": _cgroup(sampler, died),
        "kernel_log": {
            "readable": kernel_log.readable,
            "reason": kernel_log.reason,
            "lines": kernel_lines[-40:],
        },
        "colab_events": {"readable": colab.readable, "lines": colab.read_new()},
        "disks": {
            "run": _space(folder),
            "cwd": _space(str(attempt.get("cwd") or "/")),
            "tmp": _space(os.environ.get("TMPDIR", "/tmp")),  # noqa: S108 - only its free space is read
            "shm": _space(_SHM),
        },
        "cpu": {
            "used": sampler.cpu_of_main,
            "soft_limit": soft,
            "hard_limit": hard,
            "soft_before": soft_before,
        },
        "pids": _pids(sampler),
        "processes": holders(sampler),
        "alive": [
            pid
            for pid in sampler.children
            if procfs.zombie_status(pid) is None and os.path.exists(f"/proc/{pid}")
        ],
        "last": round(died - last_sample, 4) if last_sample is not None else None,
        "gap": round(longest_gap, 3),
        "gpu": sampler.gpus,
    }


def holders(sampler: Sampler) -> list[dict[str, object]]:
    """The processes of the tree as last seen, the largest first."""
    largest = sorted(sampler.rss.items(), key=lambda item: -item[1])[:_HOLDERS_MOST]
    return [
        {
            "pid": pid,
            "name": mask_text(sampler.names.get(pid, "?")),
            "role": role(sampler, pid),
            "rss": rss,
        }
        for pid, rss in largest
    ]


def role(sampler: Sampler, pid: int) -> str:
    """What a process is to the training."""
    if pid == sampler.pid:
        return "main"
    return process.ROLE if pid in sampler.helpers else "child"


def _cgroup(sampler: Sampler, now: float) -> dict[str, object] | None:
    group = sampler.cgroup
    if group is None:
        return None
    strangers = [
        {
            "pid": pid,
            "name": mask_text(procfs.process_name(pid)),
            "role": process.ROLE if process.is_helper(pid) else None,
            "rss": procfs.process_memory(pid) or None,
        }
        for pid in sampler.foreign[:_HOLDERS_MOST]
    ]
    return {
        "path": group.limit_path or group.path,
        "version": group.version,
        "limit": group.limit(),
        "used": group.used(),
        "peak": group.peak(),
        "group_kill": group.group_kill(),
        "foreign": strangers,
        "foreign_age": round(now - sampler.foreign_seen, 3) if sampler.foreign_seen is not None else None,
    }


def _pids(sampler: Sampler) -> dict[str, object] | None:
    current, most = sampler.cgroup.pids_limit() if sampler.cgroup is not None else (None, None)
    return {"current": current, "max": most} if most is not None else None


def _space(path: str) -> dict[str, object] | None:
    found = disk.space(path)
    return {"path": path, "free": found.free, "total": found.total} if found else None


class Parent:
    """The parent as it was when the recording began; its end is learnt through its pidfd.

    Reparenting is no sign by itself: it says nothing of when, and a subreaper may take init's place.
    """

    def __init__(self, pid: int) -> None:
        self._child = pid
        self.pid = _parent_of(pid)
        self.pidfd = -1
        self._name = procfs.process_name(self.pid) if self.pid else ""
        self._is_awaited = self.pid is not None and _awaits(pid, self.pid)
        if not self.pid:
            return  # outside of our PID namespace, or gone already
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.pid = None
            return
        if _parent_of(pid) != self.pid:  # it ended in between: the number may be somebody else's
            self.close()

    def describe(self, status: int | None, source: str | None) -> dict[str, object]:
        """What its end is worth to a verdict, for the event `parent-death`."""
        return {
            "pid": self.pid,
            "name": mask_text(self._name),
            "status": status,
            "source": source,
            "awaited": self._is_awaited,
        }

    def close(self) -> None:
        """Let go of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd, self.pid = -1, None


def _parent_of(pid: int) -> int | None:
    found = procfs.stat_of(pid)
    return found.ppid if found is not None and found.ppid > 1 else None


def _awaits(pid: int, parent: int) -> bool:
    """Whether Jupyter told this process to end with that parent; what it starts inherits the word, not the parent."""
    mark = b"JPY_PARENT_PID=%d" % parent
    return mark in procfs.read_bytes(f"/proc/{pid}/environ", 1 << 20).split(b"\0")
