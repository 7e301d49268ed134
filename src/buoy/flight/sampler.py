"""Reads what the process tree uses, cheaply: persistent descriptors, and each thing as often as it matters.

Runs in the sidecar. A sample is a list in the order of `log.FIELDS`; what cannot be read is None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from buoy.flight import beacon
from buoy.flight.attempt import RunDisk
from buoy.machine import cgroup, disk, gpu, host, process, procfs
from buoy.machine.files import open_regular
from buoy.text import whole_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from buoy.machine.threads import Look

FAST_HZ = 10.0
CALM_HZ = 5.0
_FAST_ABOVE = 0.6
"""Share of RAM or VRAM in use above which samples come at the fast rate."""
_SLOW_PERIOD = 1.0
_GPU_PERIOD = 2.0
_SHM = "/dev/shm"  # noqa: S108 - only its free space is read
_BEACONS_MOST = 64
_LOOKS = 4


class Sampler:
    """The readings of one process tree."""

    def __init__(
        self, pid: int, folder: str, run_folder: str, name: str = "", ours: tuple[int, ...] = ()
    ) -> None:
        self.pid = pid
        self._folder = folder
        self.disk = RunDisk(folder, run_folder)
        self._ours = {os.getpid(), pid, *ours}
        self.main = procfs.ProcessReader(pid)
        # Children of the main thread are looked for in every sample: a loader worker may die young.
        self._direct_children = procfs.FileReader(f"/proc/{pid}/task/{pid}/children")
        self.cgroup = cgroup.find(pid)
        self._memory = host.MemoryReader()
        self._memory_total = host.memory().total
        self._host_ooms = host.OomReader()
        self.nvml = gpu.open_nvml()
        self.children: dict[int, procfs.ProcessReader] = {}
        self._zombies: dict[int, procfs.ProcessReader] = {}
        """Children whose death is known and whom their parent has not collected: they are listed as children still."""
        # Before its exec the child of `buoy run` looks like buoy: its command names it until it has run for a while.
        self.names: dict[int, str] = {pid: name or procfs.process_name(pid)}
        self._name_due = time.monotonic() + 2 * _SLOW_PERIOD
        self.rss: dict[int, int] = {}
        self._anonymous: dict[int, int] = {}
        self.helpers: set[int] = set()
        """Children that are buoy's own: no part of what the training takes, but of what the machine has to give."""
        self._looks: dict[int, int] = {}
        self.foreign: list[int] = []
        self.foreign_seen: float | None = None
        self.cpu_limits: tuple[int | None, int | None] = (None, None)
        self.gpus: list[dict] | None = None  # type: ignore[type-arg]
        self.beacons: dict[int, beacon.Reading] = {}
        self._beacon_files: dict[int, int] = {}
        self._slow_due = 0.0
        self._gpu_due = 0.0
        self._limit: int | None = None
        self._available: int | None = None
        self._used: int | None = None
        self._tree_cpu_of_dead = 0.0
        self._cpu: dict[int, float] = {}
        self._faults: dict[int, int] = {}
        self._slow: dict[str, object] = {}
        self.pressure = 0.0
        self.refaults: int | None = None
        """Pages that the memory group threw out and had to read back, ever."""

    @property
    def hz(self) -> float:
        """How often to sample now: faster as room gets short."""
        return FAST_HZ if self.pressure > _FAST_ABOVE else CALM_HZ

    def sample(self, now: float) -> list:  # type: ignore[type-arg]
        """Read everything that is due."""
        slow = now >= self._slow_due
        if slow:
            self._slow_due = now + _SLOW_PERIOD
            self._read_slowly(now)
        else:
            self._meet(map(int, self._direct_children.read().split()))
        near = self.pressure > _FAST_ABOVE
        self._read_memory(slow)
        self._read_sizes(slow or near)
        if not self._beacon_files:
            self._find_beacons()
        lead = self._read_beacons()
        if self.nvml is not None and now >= self._gpu_due:
            self._gpu_due = now + _GPU_PERIOD
            self.gpus = self.nvml.devices()
        rss = self.rss.get(self.pid)
        gpu_used, gpu_util = _sums(self.gpus)
        known = self._slow.get
        return [
            round(now, 3), round(time.time(), 3), lead.step if lead else None, lead.phase if lead else None,
            rss, self._of_the_training(), 1 + len(self.children),
            self._used, self._limit, self._available,
            round(sum(self._cpu.values()) + self._tree_cpu_of_dead, 2), sum(self._faults.values()),
            known("oom_kills"), known("memory_stall"), known("io_stall"), known("read"), known("written"),
            known("disk_free"), known("shm_free"), gpu_used, gpu_util,
            round(lead.data_wait, 3) if lead else None, known("steal"), known("throttled"),
            known("disk_total"),
        ]  # fmt: skip

    def _of_the_training(self) -> int | None:
        sizes = [rss for pid, rss in self.rss.items() if pid not in self.helpers]
        return sum(sizes) if sizes else None

    @property
    def own_memory(self) -> int | None:
        """Anonymous bytes of the training's own processes: what a limit counts, and no file that is mapped."""
        sizes = [size for pid, size in self._anonymous.items() if pid not in self.helpers]
        return sum(sizes) if sizes else None

    def lead(self) -> beacon.Reading | None:
        """The beacon of the process that trains now: the one that stepped last; before any step, the main one's."""
        own = self.beacons.get(self.pid)
        stepped = [reading for reading in self.beacons.values() if reading.step_t is not None]
        return max(stepped, key=lambda reading: reading.step_t, default=own)

    @property
    def lead_pid(self) -> int:
        """The process that trains now; before any step, the main one."""
        lead = self.lead()
        return next((pid for pid, reading in self.beacons.items() if reading is lead), self.pid)

    def look(self) -> Look:
        """What every thread of the training does: only in a stall, it opens files for each of them."""
        from buoy.machine.threads import Look

        pids = [self.pid, *(pid for pid in self.children if pid not in self.helpers)]
        return Look(time.monotonic(), pids, self.lead_pid)

    def counters(self) -> dict[str, object]:
        """The kernel's counts of OOM kills: this cgroup's, its ancestors' and the machine's."""
        group = self.cgroup
        return {
            "cgroup": {"path": group.path, "value": group.oom_kills()} if group else None,
            "cgroup_parents": [{"path": path, "value": value} for path, value in group.parent_oom_kills()]
            if group
            else [],
            "host": self._host_ooms.oom_kills(),
        }

    @property
    def cpu_of_main(self) -> float | None:
        """CPU seconds the main process used, as last read (RLIMIT_CPU counts a process, not its tree)."""
        return self._cpu.get(self.pid)

    def read_main(self) -> None:
        """What counts for the main process alone; also of a zombie, once it is dead."""
        found = self.main.stat()
        if found is not None:
            self._cpu[self.pid] = found.cpu_seconds
            self._faults[self.pid] = found.major_faults
        limits = procfs.cpu_limits(self.pid)
        if limits != (None, None):
            self.cpu_limits = limits

    def forget(self, pid: int) -> None:
        """A child is dead: keep the CPU time it used, drop the rest."""
        self._tree_cpu_of_dead += self._cpu.pop(pid, 0.0)
        self._faults.pop(pid, None)
        self.rss.pop(pid, None)
        self._anonymous.pop(pid, None)
        self.helpers.discard(pid)
        self._looks.pop(pid, None)
        self.names.pop(pid, None)
        reader = self.children.pop(pid, None)
        if reader is not None:
            self._zombies[pid] = reader

    def _read_slowly(self, now: float) -> None:
        self._meet(procfs.descendants(self.pid))
        self._read_activity()
        if now >= self._name_due:  # it may have exec'ed again
            self.names[self.pid] = procfs.process_name(self.pid) or self.names[self.pid]
        self._find_beacons()
        group = self.cgroup
        if group is not None:
            self._limit = group.limit()
            if self._limit is not None:
                self._look_for_strangers(group, now)
        room, shm = self.disk.space(now), disk.space(_SHM)
        io = procfs.io_bytes(self.pid)
        # Memory pressure of the whole machine says nothing of ours: only the cgroup's own counts.
        memory_pressure = group.pressure() if group is not None else None
        io_pressure = host.pressure("io")
        self._slow = {
            "oom_kills": self.cgroup.oom_kills() if self.cgroup is not None else self._host_ooms.oom_kills(),
            "memory_stall": memory_pressure["full"] / 1e6 if memory_pressure else None,
            "io_stall": io_pressure["full"] / 1e6 if io_pressure else None,
            "read": io[0] if io else None,
            "written": io[1] if io else None,
            "disk_free": room.free if room else None,
            "disk_total": room.total if room else None,
            "shm_free": shm.free if shm else None,
            "steal": host.steal_seconds(),
            "throttled": group.throttled_seconds() if group is not None else None,
        }
        self.refaults = group.refaults() if group is not None else None

    def _meet(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if pid not in self.children and pid not in self._ours and not self._is_zombie(pid):
                self.children[pid] = procfs.ProcessReader(pid)
                self._look_for_mark(pid)

    def _is_zombie(self, pid: int) -> bool:
        """Whether this is a child that is known to be dead, and not another that was given its number since."""
        reader = self._zombies.get(pid)
        if reader is not None and reader.stat() is None:
            self._zombies.pop(pid).close()
            return False
        return reader is not None

    def _look_for_mark(self, pid: int) -> None:
        """A child that was met before its exec, or before it could name itself, is looked at a few times more."""
        looks = self._looks.get(pid, 0)
        if looks < _LOOKS and pid not in self.helpers:
            self._looks[pid] = looks + 1
            self.names[pid] = procfs.process_name(pid) or self.names.get(pid, "")
            if process.is_helper(pid):
                self.helpers.add(pid)

    def _look_for_strangers(self, group: cgroup.Cgroup, now: float) -> None:
        members = group.pids()
        if members is None:
            return
        self.foreign = [pid for pid in members if pid not in self._ours and pid not in self.children]
        if self.foreign:
            self.foreign_seen = now

    def _read_memory(self, slow: bool) -> None:
        if slow or not self._limit:  # under a cgroup limit the machine's own room can wait
            self._available = self._memory.available()
        shares = []
        if self.cgroup is not None and self._limit:
            self._used = self.cgroup.used()
            if self._used is not None:
                shares.append(self._used / self._limit)
        if self._available is not None and self._memory_total:
            shares.append(1 - self._available / self._memory_total)
        for device in self.gpus or ():
            if device.get("used") and device.get("total"):
                shares.append(device["used"] / device["total"])
        self.pressure = max(shares, default=0.0)

    def _read_sizes(self, children_too: bool) -> None:
        readers = [(self.pid, self.main), *(self.children.items() if children_too else ())]
        for pid, reader in readers:
            rss, anonymous = reader.memory()
            if rss:  # a zombie has none: keep what it had
                self.rss[pid], self._anonymous[pid] = rss, anonymous or 0

    def _read_activity(self) -> None:
        self.read_main()
        for pid in list(self._zombies):
            self._is_zombie(pid)
        for pid, reader in self.children.items():
            found = reader.stat()
            if found is None:  # gone; whoever watches it will say so, and wants its name for that
                continue
            self._cpu[pid] = found.cpu_seconds
            self._faults[pid] = found.major_faults
            if found.state != "Z":  # a zombie has lost its command line
                self._look_for_mark(pid)

    def _find_beacons(self) -> None:
        if len(self._beacon_files) >= _BEACONS_MOST:
            return
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            kind, _, digits = name.partition("-")
            number = whole_number(digits)
            if kind == "process" and number is not None and number not in self._beacon_files:
                try:
                    self._beacon_files[number] = open_regular(os.path.join(self._folder, name, "beacon"))
                except OSError:
                    continue

    def _read_beacons(self) -> beacon.Reading | None:
        for pid, descriptor in self._beacon_files.items():
            try:
                reading = beacon.parse(os.pread(descriptor, beacon.SIZE, 0))
            except OSError:
                continue
            if reading is not None:
                self.beacons[pid] = reading
        return self.lead()


def _sums(gpus: list[dict] | None) -> tuple[int | None, int | None]:  # type: ignore[type-arg]
    used = [device["used"] for device in gpus or () if device.get("used") is not None]
    util = [device["util"] for device in gpus or () if device.get("util") is not None]
    return (sum(used) if used else None), (max(util) if util else None)
