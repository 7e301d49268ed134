"""Where a process's control groups are: versions 1 and 2, hybrids, namespaces, bind mounts."""

from __future__ import annotations

import os

from buoy.machine.procfs import read_bytes, to_int
from buoy.machine.system import READ

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
        """The folder as a person on that machine would name it."""
        return folder[len(self._prefix) :] if folder.startswith(self._prefix) else folder


def groups_of(pid: int, controller: str, root: str = "/") -> Groups | None:
    """The groups of `pid` for `memory`, `cpu` or `pids`; None when the controller is not to be seen."""
    for version, group, mounted, mount_point in _candidates(pid, controller, root):
        top = root.rstrip("/") + mount_point.rstrip("/")
        sign = _SIGNS[controller, version]
        way_up = _way_up(top, _below_mount(group, mounted))
        folders = [folder for folder in way_up if _exists(f"{folder}/{sign}")]
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
    mounts = _mounts(root)
    ones, twos = [], []
    for line in read_bytes(f"{root.rstrip('/')}/proc/{pid}/cgroup").decode("utf-8", "replace").split("\n"):
        number, _, rest = line.partition(":")
        controllers, separator, group = rest.partition(":")
        if not separator or not group.startswith("/"):
            continue
        for version, options, mounted, mount_point in mounts:
            if version == 1 and controller in controllers.split(",") and controller in options:
                ones.append((1, group, mounted, mount_point))
            elif version == 2 and number == "0" and not controllers:
                twos.append((2, group, mounted, mount_point))
    return ones + twos


def _mounts(root: str) -> list[tuple[int, list[str], str, str]]:
    """(version, controllers, root of the mount, mount point) of every cgroup file system we see."""
    found = []
    data = read_bytes(root.rstrip("/") + "/proc/self/mountinfo", 1 << 20)
    for line in data.decode("utf-8", "replace").split("\n"):
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 5 and right[0] in ("cgroup", "cgroup2"):
            version = 2 if right[0] == "cgroup2" else 1
            found.append((version, right[-1].split(","), _unescape(left[3]), _unescape(left[4])))
    return found


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
    if not _exists(folders[-1]):
        return [top]
    return folders[::-1]


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def _readable(path: str) -> bool:
    try:
        os.close(os.open(path, READ))
    except (OSError, ValueError):
        return False
    return True


def _unescape(text: str) -> str:
    """Mount points write blanks as octal."""
    for octal, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, char)
    return text
