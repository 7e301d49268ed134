"""The control group of a process: memory limit, use and kills, CPU quota, number of processes.

The kernel counts an OOM kill in the victim's own group; version 2 adds it to every group above, version 1
does not. So kills and members are read in the process's own group, whichever group above sets the limit.
Limit, use and peak belong together: those come from the group with the smallest limit. Versions 1 and 2, hybrids,
namespaces and bind mounts are found.
"""

from __future__ import annotations

import os

from buoy.machine.files import READ
from buoy.machine.host import parse_pressure
from buoy.machine.procfs import FileReader, field, mounts, read_bytes, to_int

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_GROUPS = 256
_MOST_PIDS = 4096

# The file whose presence shows that a controller is at work in a folder.
_SIGNS = {
    ("memory", 1): "memory.usage_in_bytes",
    ("memory", 2): "memory.current",
    ("cpu", 1): "cpu.cfs_quota_us",
    ("cpu", 2): "cpu.stat",
    ("pids", 1): "pids.current",
    ("pids", 2): "pids.current",
}


class Groups:
    """The folders of one controller for one process: its own group first, then those above."""

    __slots__ = ("_prefix", "folders", "version")

    def __init__(self, version: int, folders: list[str], root: str = "/") -> None:
        self.version = version
        self.folders = folders
        self._prefix = root.rstrip("/")

    def shown(self, folder: str) -> str:
        """The folder as a user on that machine would name it."""
        return folder[len(self._prefix) :] if folder.startswith(self._prefix) else folder


def groups_of(pid: int, controller: str, root: str = "/") -> Groups | None:
    """The groups of `pid` for `memory`, `cpu` or `pids`; None when the controller is not to be seen."""
    for version, group, mounted, mount_point in _candidates(pid, controller, root):
        top = root.rstrip("/") + mount_point.rstrip("/")
        sign = _SIGNS[controller, version]
        way_up = _way_up(top, _below_mount(group, mounted))
        folders = [folder for folder in way_up if os.path.exists(f"{folder}/{sign}")]
        if folders:
            return Groups(version, folders, root)
    return None


def descend(folder: str) -> list[int] | None:
    """The processes in a group and in all below it; None when some cannot be read or there are too many."""
    found: list[int] = []
    folders = [folder]
    for here in folders:
        data = read_bytes(here + "/cgroup.procs", 1 << 17)
        if not data and not _readable(here + "/cgroup.procs"):
            return None
        for word in data.split():
            pid = to_int(word)
            if pid is None:
                return None
            found.append(pid)
        try:
            with os.scandir(here) as entries:
                folders.extend(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except (OSError, ValueError):
            return None
        if len(found) > _MOST_PIDS or len(folders) > _MOST_GROUPS:
            return None
    return found


def _candidates(pid: int, controller: str, root: str) -> list[tuple[int, str, str, str]]:
    """(version, group, root of the mount, mount point); version 1 first: what is bound there is not in 2."""
    mounted_here = _mounts(root)
    ones, twos = [], []
    for line in read_bytes(f"{root.rstrip('/')}/proc/{pid}/cgroup").decode("utf-8", "replace").split("\n"):
        number, _, rest = line.partition(":")
        controllers, separator, group = rest.partition(":")
        if not separator or not group.startswith("/"):
            continue
        for version, options, mounted, mount_point in mounted_here:
            if version == 1 and controller in controllers.split(",") and controller in options:
                ones.append((1, group, mounted, mount_point))
            elif version == 2 and number == "0" and not controllers:
                twos.append((2, group, mounted, mount_point))
    return ones + twos


def _mounts(root: str) -> list[tuple[int, list[str], str, str]]:
    """(version, controllers, root of the mount, mount point) of every cgroup file system we see."""
    return [
        (2 if kind == "cgroup2" else 1, options.split(","), folder, point)
        for folder, point, kind, options in mounts(root)
        if kind in ("cgroup", "cgroup2")
    ]


def _below_mount(group: str, mounted: str) -> str:
    """The part of a group's path that lies below the mount; empty when the group is not to be seen there."""
    if ".." in group.split("/") or mounted.startswith("/.."):  # outside our cgroup namespace
        return ""
    if mounted == "/":
        return group.strip("/")
    if group == mounted or group.startswith(mounted + "/"):
        return group[len(mounted) :].strip("/")
    return ""


def _way_up(top: str, below: str) -> list[str]:
    folders = [top]
    for part in below.split("/") if below else ():
        folders.append(f"{folders[-1]}/{part}")
    # The path belongs to another namespace's view: only the mount itself is sure.
    if not os.path.exists(folders[-1]):
        return [top]
    return folders[::-1]


def _readable(path: str) -> bool:
    try:
        os.close(os.open(path, READ))
    except (OSError, ValueError):
        return False
    return True


_NO_LIMIT = 1 << 60  # version 1 writes the largest page-aligned number for "unlimited"

# What the kernel holds for a group and cannot give back. `kernel` (Linux 5.18) includes the others.
_KERNEL_PARTS = (b"kernel_stack", b"pagetables", b"percpu", b"slab_unreclaimable")

_FILES = {
    1: {
        "limit": "memory.limit_in_bytes",
        "peak": "memory.max_usage_in_bytes",
        "kills": "memory.oom_control",
    },
    2: {"limit": "memory.max", "peak": "memory.peak", "kills": "memory.events"},
}


class Cgroup:
    """A process's memory group and those above it, through open files; what cannot be read is None."""

    def __init__(self, memory: Groups, others: list[str], cpu: Groups | None, pids: Groups | None) -> None:
        """`others`: counter files of groups not on the way up that count kills of this session too."""
        self.version = memory.version
        self._memory = memory
        self._cpu = cpu
        self._pids = pids
        self._names = _FILES[memory.version]
        self._limits = [FileReader(f"{folder}/{self._names['limit']}") for folder in memory.folders]
        kills = [f"{folder}/{self._names['kills']}" for folder in memory.folders]
        self._kills = [FileReader(path) for path in [*kills, *others]]
        self._peak = self._stat = FileReader("")
        self._limited = 0
        self._limit_path: str | None = None
        self._open_limited(0)
        self._hidden_limit: int | None = None
        visible = self.limit()
        # In a container of version 1 a group that cannot be seen from inside may set a smaller limit.
        stat = read_bytes(memory.folders[0] + "/memory.stat") if memory.version == 1 else b""
        hidden = field(stat, b"hierarchical_memory_limit")
        if hidden is not None and 0 < hidden < (_NO_LIMIT if visible is None else visible):
            self._hidden_limit = hidden
            self.limit()

    @property
    def path(self) -> str:
        """The process's own group, as a folder."""
        return self._memory.shown(self._memory.folders[0])

    @property
    def limit_path(self) -> str | None:
        """The group that sets the limit; None without one, `.../..` when it cannot be seen from here."""
        return self._limit_path

    def limit(self) -> int | None:
        """The smallest memory limit on the way up; None when there is none."""
        smallest, index = None, 0
        for number, reader in enumerate(self._limits):
            value = to_int(reader.read(32))
            if value is not None and 0 < value < _NO_LIMIT and (smallest is None or value < smallest):
                smallest, index = value, number
        hidden = self._hidden_limit
        if hidden is not None and (smallest is None or hidden < smallest):
            index = len(self._limits) - 1
            self._limit_path = self._memory.shown(self._memory.folders[index]) + "/.."
            smallest = hidden
        else:
            self._limit_path = None if smallest is None else self._memory.shown(self._memory.folders[index])
        if index != self._limited:
            self._open_limited(index)
        return smallest

    def used(self) -> int | None:
        """Bytes of that group that the kernel cannot take back: anonymous and shared memory, and its own."""
        data = self._stat.read(8192)
        if self.version == 1:
            anon, shared = field(data, b"total_rss"), field(data, b"total_shmem")
            return None if anon is None else anon + (shared or 0)
        anon = field(data, b"anon")
        if anon is None:
            return None
        kernel = field(data, b"kernel")
        if kernel is not None:
            kernel -= field(data, b"slab_reclaimable") or 0
        else:
            kernel = sum(field(data, part) or 0 for part in _KERNEL_PARTS)
        return anon + (field(data, b"shmem") or 0) + max(kernel, 0)

    def refaults(self) -> int | None:
        """Pages that were thrown out and had to be read back, ever; only a difference says something."""
        data = self._stat.read(8192)
        prefix = b"total_" if self.version == 1 else b""
        parts = [field(data, prefix + b"workingset_refault" + kind) for kind in (b"_file", b"_anon", b"")]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    def peak(self) -> int | None:
        """The most that group was ever charged, since it was made; Linux 5.19 and later for version 2."""
        return to_int(self._peak.read(32))

    def oom_kills(self) -> int | None:
        """Processes of the own group killed for lack of memory, ever; only a difference says something."""
        return field(self._kills[0].read(512), b"oom_kill")

    def parent_oom_kills(self) -> list[tuple[str, int | None]]:
        """The same counter for the groups above, and for Colab's other group."""
        readers = self._kills[1:]
        return [
            (self._memory.shown(os.path.dirname(reader.path)), field(reader.read(512), b"oom_kill"))
            for reader in readers
        ]

    def group_kill(self) -> bool | None:
        """Whether an OOM kill takes every process of the group at once (`memory.oom.group`)."""
        if self.version == 1:
            return False
        flags = [read_bytes(f"{folder}/memory.oom.group", 8).strip() for folder in self._memory.folders]
        if b"1" in flags[: self._limited + 1]:
            return True
        return False if flags[0] == b"0" else None

    def pids(self) -> list[int] | None:
        """Processes in the own group and below; 0 stands for one outside our PID namespace.

        None when the list would be incomplete.
        """
        return descend(self._memory.folders[0])

    def pressure(self) -> dict[str, int] | None:
        """Microseconds the own group has stalled for memory; version 2 only."""
        return parse_pressure(read_bytes(self._memory.folders[0] + "/memory.pressure", 512))

    def cpu_quota(self) -> float | None:
        """The smallest CPU allowance on the way up, in cores; None when there is none."""
        return self._smallest_quota()[0]

    def throttled_seconds(self) -> float | None:
        """How long that group was held back by its quota."""
        if self._cpu is None:
            return None
        data = read_bytes(self._smallest_quota()[1] + "/cpu.stat", 1024)
        if self._cpu.version == 1:
            nanoseconds = field(data, b"throttled_time")
            return None if nanoseconds is None else nanoseconds / 1e9
        microseconds = field(data, b"throttled_usec")
        return None if microseconds is None else microseconds / 1e6

    def pids_limit(self) -> tuple[int | None, int | None]:
        """How many processes and threads there are and may be, in the group with the least room left."""
        tightest: tuple[int | None, int | None] = (None, None)
        for folder in self._pids.folders if self._pids else ():
            current = to_int(read_bytes(folder + "/pids.current", 32))
            most = to_int(read_bytes(folder + "/pids.max", 32))
            if current is None:
                continue
            if tightest[0] is None or (most is not None and most - current < _room(tightest)):
                tightest = (current, most)
        return tightest

    def close(self) -> None:
        """Let go of the files."""
        for reader in [*self._limits, *self._kills, self._peak, self._stat]:
            reader.close()

    def _open_limited(self, index: int) -> None:
        for reader in (self._peak, self._stat):
            reader.close()
        self._limited = index
        folder = self._memory.folders[index]
        self._peak = FileReader(f"{folder}/{self._names['peak']}")
        self._stat = FileReader(f"{folder}/memory.stat")

    def _smallest_quota(self) -> tuple[float | None, str]:
        if self._cpu is None:
            return None, ""
        smallest, where = None, self._cpu.folders[0]
        for folder in self._cpu.folders:
            if self._cpu.version == 1:
                quota = to_int(read_bytes(folder + "/cpu.cfs_quota_us", 32))
                period = to_int(read_bytes(folder + "/cpu.cfs_period_us", 32))
            else:
                words = read_bytes(folder + "/cpu.max", 64).split()
                quota, period = (to_int(words[0]), to_int(words[1])) if len(words) == 2 else (None, None)
            if quota and period and (smallest is None or quota / period < smallest):
                smallest, where = quota / period, folder
        return smallest, where


def find(pid: int, root: str = "/") -> Cgroup | None:
    """The memory group of a process; None when there is no memory controller to be seen."""
    memory = groups_of(pid, "memory", root)
    others = colab_memory_events(os.environ, root)
    for path in others:
        folder = os.path.dirname(path)
        if memory is not None and folder in memory.folders:
            continue
        if pid in (descend(folder) or ()):
            # Colab keeps kernels in a group that /proc/PID/cgroup does not lead to: that one counts.
            if memory is not None:
                name = _FILES[memory.version]["kills"]
                others = [*(f"{above}/{name}" for above in memory.folders), *others]
            memory = Groups(2, [folder], root)
            break
    if memory is None:
        return None
    counted = {f"{folder}/{_FILES[memory.version]['kills']}" for folder in memory.folders}
    others = [path for path in dict.fromkeys(others) if path not in counted]
    return Cgroup(memory, others, groups_of(pid, "cpu", root), groups_of(pid, "pids", root))


def _room(pair: tuple[int | None, int | None]) -> float:
    current, most = pair
    return float("inf") if most is None or current is None else most - current


# Colab: a second memory cgroup for kernels, and a file of kills. Read in a copy of its oom_monitor.sh, not tried live:
# the files named in CGROUP_MEMORY_EVENTS (blanks between) are polled each second; a change of their summed `oom_kill`
# appends `epoch,2,oom_kill=N` to /var/colab/events.
COLAB_EVENTS = "/var/colab/events"
_COLAB_KERNELS = "/var/colab/cgroup/jupyter-children/memory.events"
_EVENTS_MOST_BYTES = 65536
_EVENTS_MOST_LINES = 200


def colab_memory_events(environ: Mapping[str, str], root: str = "/") -> list[str]:
    """The `memory.events` files of a Colab session that exist, below `root`; empty elsewhere."""
    named = environ.get("CGROUP_MEMORY_EVENTS", "").split() or [_COLAB_KERNELS]
    paths = [root.rstrip("/") + name for name in named if name.startswith("/") and ".." not in name]
    return [path for path in paths if path.endswith("/memory.events") and os.path.exists(path)]


class ColabEvents:
    """Lines that Colab adds to its event file from now on."""

    def __init__(self, root: str = "/") -> None:
        self._path = root.rstrip("/") + COLAB_EVENTS
        try:
            self._offset = os.stat(self._path).st_size
        except (OSError, ValueError):
            self._offset = 0  # the file appears with the first event

    @property
    def readable(self) -> bool:
        """Whether this machine has such a file, or the folder in which Colab would make it."""
        return os.access(self._path, os.R_OK) or os.access(os.path.dirname(self._path), os.R_OK)

    def read_new(self) -> list[str]:
        """Whole lines since the last call, without control bytes."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return []
        try:
            if os.fstat(fd).st_size < self._offset:  # started over
                self._offset = 0
            data = os.pread(fd, _EVENTS_MOST_BYTES, self._offset)
        except OSError:
            return []
        finally:
            os.close(fd)
        end = data.rfind(b"\n") + 1
        self._offset += end if end or len(data) < _EVENTS_MOST_BYTES else len(data)
        lines = data[:end].decode("ascii", "replace").split("\n")
        shown = ["".join(char if char.isprintable() else " " for char in line)[:200] for line in lines]
        return [line for line in shown if line.strip()][:_EVENTS_MOST_LINES]
