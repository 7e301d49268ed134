"""What this session has and since when: read from the machine, else from dated platform data.

Sessions die of old age, so their age is a reading like memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from buoy.machine import cgroup, disk, gpu, host, platforms
from buoy.machine.files import TICKS
from buoy.machine.procfs import stat_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, cores and seconds; each None when nothing says so, each source in words a user can check."""

    ram: int | None
    ram_source: str | None
    swap: int | None
    cgroup_path: str | None
    """The control group that sets `ram`; None when it is the machine itself."""
    cpus: int | None
    """Cores this process may run on."""
    cpu_quota: float | None
    """Cores' worth of time that a control group allows; None without such a quota."""
    shm: int | None
    disk: int | None
    """All that the run folder's file system (or its quota) holds, free or not."""
    disk_source: str | None
    gpus: tuple[dict[str, Any], ...]
    """`{"index", "name", "total", "source"}` each."""
    time_limit: float | None
    """Seconds from the session's beginning (`buoy.machine.limits`)."""
    time_limit_source: str | None
    platform: str | None
    """Id of the platform row."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for attempt.json."""
        return asdict(self)


def read(
    pid: int | None = None,
    folder: str = ".",
    environ: Mapping[str, str] | None = None,
    root: str = "/",
) -> Limits:
    """The limits for a process (default: this one) that keeps its run in `folder`."""
    surroundings = os.environ if environ is None else environ
    devices = _devices() if root == "/" else []
    names = [str(device["name"]) for device in devices if device["name"]]
    row = platforms.detect(surroundings, root, names or gpu.driver_names(root))
    memory = host.memory(root)
    ram, ram_source, cgroup_path, quota = _memory_limit(pid or os.getpid(), memory.total, root)
    if ram is None and root == "/" and (ram := host.installed_memory()) is not None:
        ram_source = "sysconf"
    if ram is None and row is not None and row.ram is not None:
        ram, ram_source = int(row.ram.value), row.cite(row.ram)
    cpus = host.cpu_count(root, pid)
    if cpus is None and row is not None and row.vcpus is not None:
        cpus = int(row.vcpus.value)
    room, shm = disk.space(folder, root), disk.space("/dev/shm", root)  # noqa: S108 - asked about, not written to
    disk_total, disk_source = (room.total, room.source) if room is not None else (None, None)
    if disk_total is None and row is not None and row.disk is not None:
        disk_total, disk_source = int(row.disk.value), row.cite(row.disk)
    time_limit = row.max_runtime if row is not None else None
    return Limits(
        ram=ram,
        ram_source=ram_source,
        swap=memory.swap_total,
        cgroup_path=cgroup_path,
        cpus=cpus,
        cpu_quota=quota,
        shm=None if shm is None else shm.total,
        disk=disk_total,
        disk_source=disk_source,
        gpus=tuple(devices) or _gpus_from(row),
        time_limit=None if time_limit is None else time_limit.value,
        time_limit_source=None if time_limit is None or row is None else row.cite(time_limit),
        platform=None if row is None else row.id,
    )


def _memory_limit(
    pid: int, total: int | None, root: str
) -> tuple[int | None, str | None, str | None, float | None]:
    """(bytes, source, group that sets them, CPU quota): a group may allow more than the machine has."""
    group = cgroup.find(pid, root)
    limit = quota = path = None
    if group is not None:
        limit, path, quota = group.limit(), group.limit_path, group.cpu_quota()
        group.close()
    if limit is not None and (total is None or limit < total):
        return limit, f"cgroup {path}", path, quota
    return total, None if total is None else "/proc/meminfo", None, quota


def _devices() -> list[dict[str, Any]]:
    nvml = gpu.open_nvml()
    if nvml is None:
        return []
    found = [{key: device[key] for key in ("index", "name", "total")} for device in nvml.devices()]
    nvml.close()
    return [{**device, "source": "NVML"} for device in found]


def _gpus_from(row: platforms.Platform | None) -> tuple[dict[str, Any], ...]:
    if row is None or row.device_memory is None:
        return ()
    total, source = int(row.device_memory.value), row.cite(row.device_memory)
    name = row.accelerator
    return tuple(
        {"index": index, "name": name, "total": total, "source": source} for index in range(row.devices or 0)
    )


def session_started(root: str = "/", environ: Mapping[str, str] | None = None) -> float | None:
    """Our best guess, in seconds since 1970, at when this session began; None when nothing says so.

    Under SLURM the job says so. On a platform that gives each session its own machine or container PID 1
    began with it. Elsewhere a session is this process.
    """
    surroundings = os.environ if environ is None else environ
    platform = platforms.detect(surroundings, root)
    if platform is not None and platform.platform == "slurm":
        return platforms.epoch(surroundings, "SLURM_JOB_START_TIME") or _process_started("self", root)
    return _process_started("self" if platform is None else "1", root)


def _process_started(pid: str, root: str) -> float | None:
    stat = stat_of(pid, root)
    boot = host.boot_time(root)
    return None if stat is None or boot is None else boot + stat.start_ticks / TICKS
