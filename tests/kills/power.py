"""Power loss, which SIGKILL cannot show: recorded calls replayed with unsynced effects dropped.

The model is what POSIX allows and file systems have done: data that was not fsynced may be missing, torn at any
4096 bytes, or there with the file's new size; a name that was made, renamed or removed in a folder may be as
before or as after until that folder is fsynced, each on its own and in any combination. Nothing else is assumed,
not even that an fsynced file has a durable name.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoint.ground import save
from tests.kills.calls import SIZE, save_here
from tests.kills.kind import Tally, judge, must_bite

_SECTOR = 4096


@dataclass
class Inode:
    """A file or a folder: what is surely on the disk, and what may be."""

    is_folder: bool
    data: bytes = b""
    loose: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last fsync; an offset of -1 with a length stands for a truncation."""
    names: dict[str, int] = field(default_factory=dict)
    loose_names: list[tuple[str, int | None]] = field(default_factory=list)
    """Changed names since the last fsync: name -> inode, or None for removed."""


class Disk:
    """A recording of calls, and what a power cut after any of them could leave."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.events: list[tuple[Any, ...]] = []
        self._open: dict[int, str] = {}

    # -- recording: an `os` that notes what it does ---------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        note = {"mkdir": self._mkdir, "open": self._opened, "write": self._write, "pwrite": self._pwrite,
                "ftruncate": self._truncate, "fsync": self._fsync, "rename": self._rename, "replace": self._rename,
                "close": self._close, "unlink": self._unlink, "rmdir": self._unlink}.get(name)  # fmt: skip
        if note is None:
            return real

        def called(*arguments: Any, **options: Any) -> Any:
            paths = [self._whole(each, options) if isinstance(each, str) else each for each in arguments]
            result = real(*arguments, **options)
            note(result, *paths)
            return result

        return called

    def _whole(self, path: str, options: dict[str, Any]) -> str:
        """A path that may be one in an open folder."""
        folder = options.get("dir_fd", options.get("src_dir_fd"))
        return path if folder is None else os.path.join(self._open[folder], path)

    def fdopen(self, descriptor: int, *mode: str) -> Any:
        """`os.fdopen`, whose file closes the descriptor where no recorder sees it."""
        del self._open[descriptor]
        return os.fdopen(descriptor, *mode)

    def _add(self, event: tuple[Any, ...]) -> None:
        if (event[1] + os.sep).startswith(self.root + os.sep):  # the rest is on another disk
            self.events.append(event)

    def _mkdir(self, _: Any, path: str, *rest: Any) -> None:
        self._add(("mkdir", path))

    def _opened(self, descriptor: int, path: str, flags: int, *rest: Any) -> None:
        self._open[descriptor] = path
        if flags & os.O_CREAT:
            self._add(("create", path))
        if flags & os.O_TRUNC:
            self._add(("truncate", path, 0))

    def _write(self, done: int, descriptor: int, data: Any) -> None:
        self._add(("append", self._open[descriptor], bytes(data[:done])))

    def _pwrite(self, done: int, descriptor: int, data: Any, at: int) -> None:
        self._add(("write", self._open[descriptor], at, bytes(data[:done])))

    def _truncate(self, _: Any, descriptor: int, size: int) -> None:
        self._add(("truncate", self._open[descriptor], size))

    def _fsync(self, _: Any, descriptor: int) -> None:
        self._add(("fsync", self._open[descriptor]))

    def _rename(self, _: Any, old: str, new: str) -> None:
        self._add(("rename", old, new))

    def _unlink(self, _: Any, path: str) -> None:
        self._add(("unlink", path))

    def _close(self, _: Any, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    # -- replay ---------------------------------------------------------------------------------------------

    def cut(self, before: Path, until: int, chance: random.Random, target: Path) -> None:
        """Build in `target` what a power cut after `until` calls may leave of a disk that held `before`."""
        inodes: list[Inode] = [Inode(is_folder=True)]
        _load(inodes, 0, before)
        live: dict[int, dict[str, int]] = {n: dict(i.names) for n, i in enumerate(inodes) if i.is_folder}
        sizes = {n: len(i.data) for n, i in enumerate(inodes)}

        def find(path: str) -> tuple[int, str, int | None]:
            parts = os.path.relpath(path, self.root).split(os.sep)
            at = 0
            for part in parts[:-1]:
                at = live[at][part]
            return at, parts[-1], 0 if parts == ["."] else live[at].get(parts[-1])

        def change(folder: int, name: str, inode: int | None) -> None:
            inodes[folder].loose_names.append((name, inode))
            if inode is None:
                live[folder].pop(name, None)
            else:
                live[folder][name] = inode

        for event in self.events[:until]:
            kind, path = event[0], event[1]
            folder, name, inode = find(path)
            if kind in ("mkdir", "create"):
                inodes.append(Inode(is_folder=kind == "mkdir"))
                number = len(inodes) - 1
                live[number], sizes[number] = {}, 0
                change(folder, name, number)
            elif kind == "rename":
                to_folder, to_name, _ = find(event[2])
                change(to_folder, to_name, inode)
                change(folder, name, None)
            elif kind == "unlink":
                change(folder, name, None)
            else:
                assert inode is not None
                _change_data(inodes[inode], sizes, inode, event)
        _settle(inodes, chance)
        _build(inodes, 0, target, set())


def _change_data(inode: Inode, sizes: dict[int, int], number: int, event: tuple[Any, ...]) -> None:
    kind = event[0]
    if kind == "fsync":
        inode.data = _applied(inode.data, inode.loose)
        inode.loose = []
        for name, target in inode.loose_names:
            _set(inode.names, name, target)
        inode.loose_names = []
        return
    if kind == "truncate":
        inode.loose.append((-1, event[2].to_bytes(8, "little")))
        sizes[number] = event[2]
        return
    at, data = (sizes[number], event[2]) if kind == "append" else (event[2], event[3])
    sizes[number] = max(sizes[number], at + len(data))
    for start in range(0, len(data), _SECTOR):
        inode.loose.append((at + start, data[start : start + _SECTOR]))


def _settle(inodes: list[Inode], chance: random.Random) -> None:
    """Decide for everything unsynced whether it reached the disk."""
    luck = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))  # nothing, little, half, most, all of it
    for inode in inodes:
        for name, target in inode.loose_names:
            if chance.random() < luck:
                _set(inode.names, name, target)
        kept = [write for write in inode.loose if chance.random() < luck]
        inode.data = _applied(inode.data, kept)


def _applied(data: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    room = bytearray(data)
    for at, piece in writes:
        if at < 0:
            size = int.from_bytes(piece, "little")
            room[size:] = b""
            room.extend(bytes(size - len(room)))
            continue
        room.extend(bytes(max(0, at - len(room))))
        room[at : at + len(piece)] = piece
    return bytes(room)


def _set(names: dict[str, int], name: str, target: int | None) -> None:
    if target is None:
        names.pop(name, None)
    else:
        names[name] = target


def _load(inodes: list[Inode], number: int, path: Path) -> None:
    for entry in sorted(path.iterdir()):
        inodes.append(Inode(is_folder=entry.is_dir(), data=b"" if entry.is_dir() else entry.read_bytes()))
        child = len(inodes) - 1
        inodes[number].names[entry.name] = child
        if entry.is_dir():
            _load(inodes, child, entry)


def _build(inodes: list[Inode], number: int, path: Path, seen: set[int]) -> None:
    path.mkdir()
    for name, child in inodes[number].names.items():
        if child in seen:  # both names of a rename survived: fsck keeps one
            continue
        seen.add(child)
        if inodes[child].is_folder:
            _build(inodes, child, path / name, seen)
        else:
            (path / name).write_bytes(inodes[child].data)


def power_loss(number: int, chance: random.Random, folder: Path) -> Tally:
    """A save is cut off after any of its calls; the one before, or the new one, is there whole."""
    before = folder / "before"
    save(before, 1, size=SIZE)
    after = folder / "after"
    shutil.copytree(before, after)
    disk = Disk(str(after))
    save_here(after, 2, disk)
    promised = len(disk.events)
    return _replay(disk, before, promised, 5 * number, chance, folder)


def power_loss_without_fsync(number: int, chance: random.Random, folder: Path) -> Tally:
    """The proof that the model bites: the same save with its fsyncs struck out must be caught."""
    before = folder / "before"
    save(before, 1, size=SIZE)
    after = folder / "after"
    shutil.copytree(before, after)
    disk = Disk(str(after))
    save_here(after, 2, disk)
    disk.events = [event for event in disk.events if event[0] != "fsync"]
    found = _replay(disk, before, len(disk.events), 5 * number, chance, folder)
    return must_bite(found, "a save without any fsync")


def _replay(
    disk: Disk, before: Path, promised: int, times: int, chance: random.Random, folder: Path
) -> Tally:
    tally = Tally()
    for trial in range(times):
        until = promised if trial % 10 == 0 else chance.randrange(promised + 1)
        target = folder / "cut"
        disk.cut(before, until, chance, target)
        judge(tally, target, 2 if until == promised else 1, SIZE, f"replay {trial}, cut after call {until}")
        shutil.rmtree(target)
    return tally
