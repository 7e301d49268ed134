"""The ground a trial stands on: memory and process groups, small file systems, namespaces; all taken away."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.deaths.kind import Kind

CGROUPS = Path("/sys/fs/cgroup")
DISK_MIB = 4
SHM_MIB = 8


def missing(need: str) -> str | None:
    """Why this machine cannot offer `need`, in words; None when it can."""
    if need in ("memory-cgroup", "nested-cgroup", "other-cgroup"):
        return _no_group("memory")
    if need in ("pids-cgroup", "cpu-cgroup"):
        return _no_group(need.removesuffix("-cgroup"))
    if need in ("disk", "small-shm"):
        return _fails("this machine does not let us mount a small tmpfs", _SMALL_SHM, "true")
    if need == "pid-namespace":
        return _fails("this machine does not let us make a process namespace", *_PID_NAMESPACE, "true")
    if need == "x86":
        return (
            None
            if platform.machine() == "x86_64"
            else f"needs an x86 processor, this is {platform.machine()}"
        )
    return None if importlib.util.find_spec(need) else f"{need} is not installed"


_SMALL_SHM = (
    "unshare",
    "-m",
    "sh",
    "-c",
    f'mount -t tmpfs -o size={SHM_MIB}m tmpfs /dev/shm && exec "$@"',
    "sh",
)
_PID_NAMESPACE = ("unshare", "-p", "-f", "--mount-proc")
_JOIN = (
    "sh",
    "-c",
    'for group in $GROUPS_TO_JOIN; do echo $$ > "$group/cgroup.procs" || exit 99; done; exec "$@"',
    "sh",
)


def _fails(reason: str, *command: str | tuple[str, ...]) -> str | None:
    words = [word for part in command for word in ((part,) if isinstance(part, str) else part)]
    try:
        done = subprocess.run(words, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{reason}: {error}"
    return None if done.returncode == 0 else f"{reason}: {done.stderr.decode(errors='replace').strip()}"


def _no_group(controller: str) -> str | None:
    try:
        _parent(controller).joinpath(f"deaths-probe-{os.getpid()}").mkdir()
    except OSError as error:
        return f"no writable {controller} cgroup (v1) on this machine: {error}"
    _parent(controller).joinpath(f"deaths-probe-{os.getpid()}").rmdir()
    return None


def _parent(controller: str) -> Path:
    """Our own group: what the trial makes is counted against us, and vanishes with us."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return CGROUPS / controller / path.lstrip("/")
    raise FileNotFoundError(f"no {controller} controller of cgroup v1")


class Ground:
    """Everything a trial needs from the machine, made on entering and removed on leaving."""

    def __init__(self, kind: Kind, keep: bool = False) -> None:
        self.kind = kind
        self.keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix=f"buoy-death-{kind.name}-"))
        self.memory: Path | None = None
        self.other: Path | None = None
        self.pids: Path | None = None
        self.cpu: Path | None = None
        self._groups: list[Path] = []
        self._disk: Path | None = None

    def __enter__(self) -> Ground:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        kind = self.kind
        if kind.memory:
            outer = self._group("memory", self.folder.name, kind.memory)
            self.memory = outer
            # The limit is the parent's; the inner group has none of its own.
            if "nested-cgroup" in kind.needs:
                self.memory = self._group("memory", f"{self.folder.name}/inner", None)
        if "other-cgroup" in kind.needs:
            self.other = self._group("memory", f"{self.folder.name}-other", 64)
        if "pids-cgroup" in kind.needs:
            self.pids = self._group("pids", self.folder.name, None)
        if kind.starved:
            self.cpu = self._group("cpu", self.folder.name, None)
        if "disk" in kind.needs:
            disk = self.folder / "disk"
            disk.mkdir()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,nr_inodes=100", "tmpfs", str(disk)],
                check=True,
            )
            self._disk = disk

    def _group(self, controller: str, name: str, limit: int | None) -> Path:
        group = _parent(controller) / name
        group.mkdir()
        self._groups.append(group)
        if limit is not None:
            (group / "memory.limit_in_bytes").write_text(str(limit << 20))
        return group

    def prefix(self) -> tuple[list[str], dict[str, str]]:
        """Words to put before a command, and variables it needs, so that it stands on this ground."""
        words: list[str] = []
        groups = [str(group) for group in (self.memory, self.pids, self.cpu) if group]
        if groups:
            words += _JOIN
        if "small-shm" in self.kind.needs:
            words += _SMALL_SHM
        if "pid-namespace" in self.kind.needs:
            words += _PID_NAMESPACE
        return words, ({"GROUPS_TO_JOIN": " ".join(groups)} if groups else {})

    def fill_in(self, text: str) -> str:
        """`text` with the names of places filled in."""
        places = {"stage": self.folder, "disk": self.folder / "disk", "other": self.other or ""}
        for name, place in places.items():
            text = text.replace("{" + name + "}", str(place))
        return text

    def limit_processes(self, more: int) -> None:
        """From now on at most so many more processes and threads than there are."""
        assert self.pids is not None
        now = int((self.pids / "pids.current").read_text())
        (self.pids / "pids.max").write_text(str(now + more))

    def starve(self, percent: int, pid: int | None = None) -> None:
        """From now on the whole trial together, or this process alone, gets so much of one core."""
        group = self.cpu or self._group("cpu", self.folder.name, None)
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(percent * 1000))
        if pid is not None:
            (group / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many processes of the trial's group the kernel killed for memory."""
        assert self.memory is not None
        words = (self.memory / "memory.oom_control").read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def __exit__(self, *_: object) -> None:
        for group in reversed(self._groups):
            _empty(group)
        if self._disk is not None:
            if self.keep:
                shutil.copytree(self._disk, self.folder / "disk-kept", ignore=shutil.ignore_patterns("*.bin"))
            subprocess.run(["umount", "-l", str(self._disk)], check=False, capture_output=True)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _empty(group: Path) -> None:
    """Kill what is left in a group and remove it; the kernel needs a moment to let go."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            for pid in (group / "cgroup.procs").read_text().split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
