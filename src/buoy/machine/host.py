"""The machine as a whole: memory, kills by the kernel, pressure, CPU, and which boot of it this is."""

from __future__ import annotations

import os

from buoy.machine.files import PAGE, TICKS
from buoy.machine.procfs import FileReader, field, read_bytes, stat_of, to_int

_INITIAL_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO: the same number on every Linux
_VMSTAT_SIZE = 32768


class Memory:
    """Bytes; each field None when /proc/meminfo does not give it."""

    __slots__ = ("available", "swap_total", "total")

    def __init__(self, meminfo: bytes) -> None:
        self.total = _kib(meminfo, b"MemTotal:")
        self.available = _kib(meminfo, b"MemAvailable:")
        self.swap_total = _kib(meminfo, b"SwapTotal:")


def memory(root: str = "/") -> Memory:
    """The machine's memory, whatever a cgroup may allow of it."""
    return Memory(read_bytes(_path(root, "proc/meminfo")))


def installed_memory() -> int | None:
    """All of the machine's RAM where there is no /proc, as on a Mac; None where nothing says so, as on Windows."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * PAGE
    except (AttributeError, ValueError, OSError):
        return None


class MemoryReader:
    """Available memory through a file kept open."""

    def __init__(self, root: str = "/") -> None:
        self._file = FileReader(_path(root, "proc/meminfo"))

    def available(self) -> int | None:
        """Bytes that can be had without swapping."""
        return _kib(self._file.read(256), b"MemAvailable:")


class OomReader:
    """How many processes the kernel has killed for lack of memory, in every cgroup, through a file kept open."""

    def __init__(self, root: str = "/") -> None:
        self._file = FileReader(_path(root, "proc/vmstat"))

    def oom_kills(self) -> int | None:
        """Kills since boot; only a difference says something."""
        return field(self._file.read(_VMSTAT_SIZE), b"oom_kill")


def parse_pressure(data: bytes) -> dict[str, int] | None:
    """Microseconds stalled in total: `{"some": ..., "full": ...}`, a line that is missing left out.

    >>> parse_pressure(b"some avg10=0.00 avg60=0.00 avg300=0.00 total=731\\n")
    {'some': 731}
    """
    totals: dict[str, int] = {}
    for line in data.split(b"\n"):
        kind, _, rest = line.partition(b" ")
        _, found, total = rest.rpartition(b"total=")
        if kind in (b"some", b"full") and found and total.isdigit():
            totals[kind.decode("ascii")] = int(total)
    return totals or None


def pressure(kind: str, root: str = "/") -> dict[str, int] | None:
    """Stall time of the whole machine; `kind` is `memory`, `io` or `cpu`."""
    return parse_pressure(read_bytes(_path(root, "proc/pressure/" + kind), 512))


def steal_seconds(root: str = "/") -> float | None:
    """CPU time that the hypervisor gave to others, since boot, summed over cores."""
    words = read_bytes(_path(root, "proc/stat"), 512).split(b"\n", 1)[0].split()
    ticks = to_int(words[8]) if len(words) > 8 and words[0] == b"cpu" else None
    return None if ticks is None else ticks / TICKS


def cpu_count(root: str = "/", pid: int | None = None) -> int | None:
    """Cores that a process may run on, else all of the machine's; a cgroup's quota is `Cgroup.cpu_quota`."""
    status = read_bytes(_path(root, f"proc/{'self' if pid is None else pid}/status"))
    for line in status.split(b"\n"):
        if line.startswith(b"Cpus_allowed_list:") and (allowed := _count_ranges(line.partition(b":")[2])):
            return allowed
    lines = read_bytes(_path(root, "proc/stat")).split(b"\n")
    return sum(line[:3] == b"cpu" and line[3:4].isdigit() for line in lines) or None


def boot_id(root: str = "/") -> str | None:
    """A name for this boot of the kernel; another after a reboot or on another machine."""
    text = read_bytes(_path(root, "proc/sys/kernel/random/boot_id"), 64).decode("ascii", "replace").strip()
    return text if len(text) == 36 and text.isprintable() else None


def hostname() -> str:
    """The name the machine gives itself."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def kernel_release() -> str:
    """The kernel's version, as `uname -r` prints it."""
    return os.uname().release


def pid1_start(root: str = "/") -> int | None:
    """When PID 1 started, in clock ticks since boot: another number means another container or machine."""
    stat = stat_of(1, root)
    return None if stat is None else stat.start_ticks


def boot_time(root: str = "/") -> int | None:
    """Wall-clock second of the boot, by the clock as it is now."""
    return field(read_bytes(_path(root, "proc/stat")), b"btime")


def initial_pid_namespace(root: str = "/") -> bool | None:
    """Whether our pids are the ones the kernel log speaks of."""
    try:
        target = os.readlink(_path(root, "proc/self/ns/pid"))
    except OSError:
        return None
    return target == f"pid:[{_INITIAL_PID_NAMESPACE}]" if target.startswith("pid:[") else None


def _path(root: str, rest: str) -> str:
    return f"{root.rstrip('/')}/{rest}"


def _kib(data: bytes, name: bytes) -> int | None:
    value = field(data, name)
    return None if value is None else value * 1024


def _count_ranges(text: bytes) -> int | None:
    """How many numbers a list like `0-3,8` names."""
    count = 0
    for part in text.strip().split(b","):
        first, _, last = part.partition(b"-")
        if not first.isdigit() or not (last or first).isdigit() or len(part) > 24:
            return None
        count += int(last or first) - int(first) + 1
    return count if count > 0 else None
