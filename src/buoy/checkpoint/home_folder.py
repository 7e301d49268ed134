"""A second home that is a folder: on another disk, a network share, or mostly a mounted drive."""

from __future__ import annotations

import errno
import os
import zlib

from buoy.checkpoint.commit import remove_folder, sync_folder
from buoy.checkpoint.manifest import MANIFEST
from buoy.checkpoint.moving import IS_CHECKPOINT, Pieces, Progress, as_written, expect_size, pour
from buoy.machine import disk


class FolderHome:
    """A folder on another disk or a mounted drive."""

    def __init__(self, where: str, run_name: str, mount: str | None = None) -> None:
        """`mount`: where its file system was mounted when the training began, and must still be."""
        self._where = where
        self._folder = os.path.join(where, run_name, "checkpoints")
        self._mount = mount
        self._drive = is_drive(where)

    def sizes(self) -> dict[str, dict[str, int]]:
        """The files of each checkpoint and their sizes."""
        self._expect_mounted()
        found: dict[str, dict[str, int]] = {}
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return {}
        for name in filter(IS_CHECKPOINT.fullmatch, names):
            try:
                with os.scandir(os.path.join(self._folder, name)) as entries:
                    found[name] = {
                        entry.name: entry.stat(follow_symlinks=False).st_size
                        for entry in entries
                        if entry.is_file(follow_symlinks=False)
                    }
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed since it was listed, or nothing of ours
        return found

    def read(self, name: str, file: str, most: int) -> bytes:
        """A small file, whole."""
        descriptor = os.open(
            os.path.join(self._folder, name, file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        with os.fdopen(descriptor, "rb") as opened:
            return opened.read(most)

    def write(self, name: str, file: str, data: bytes) -> None:
        """A small file, whole or not at all, and on the disk with all that was put before it."""
        target = self._prepare(name, file)
        folder = os.path.dirname(target)
        _sync(folder)  # else a power cut could leave this file beside others that have lost their names
        _write_whole(target, data)
        _sync(folder)
        _sync(self._folder)

    def put(self, source: str, name: str, file: str, pieces: Pieces, progress: Progress) -> None:
        """Copy a local file there; what an interrupted copy left is checked and gone on from."""
        target = self._prepare(name, file)
        part = target + ".part"
        try:
            with open(source, "rb") as reading, open(part, "ab") as writing:
                done, rest = _good_start(part, pieces)
                writing.truncate(done)
                reading.seek(done)
                progress(done)
                for chunk in as_written(reading, rest, file):
                    writing.write(chunk)
                    progress(len(chunk))
                writing.flush()
                os.fsync(writing.fileno())
            expect_size(os.stat(part).st_size, os.stat(source).st_size, file)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # a full place is not helped by half a file
                _unlink_quietly(part, self._drive)
            raise
        os.replace(part, target)

    def holds(self, source: str, name: str, file: str, pieces: Pieces) -> bool:
        """Whether every byte there is as the manifest has it."""
        path = os.path.join(self._folder, name, file)
        try:
            done, rest = _good_start(path, pieces)
            return not rest and os.stat(path).st_size == done
        except FileNotFoundError:
            return False

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""
        source = os.open(os.path.join(self._folder, name, file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(source, "rb") as reading, open(target, "xb") as writing:
            pour(reading, writing, progress)

    def remove(self, name: str) -> None:
        """Remove one checkpoint: first its manifest by one rename, so that no half of it looks whole."""
        folder = os.path.join(self._folder, name)
        manifest = os.path.join(folder, MANIFEST)
        if os.path.lexists(manifest) and not os.path.islink(folder):
            os.rename(manifest, manifest + ".gone")
            _sync(folder)  # else a power cut could bring it back beside half of its files
        remove_folder(folder, truncate=self._drive)

    def free(self) -> int:
        """Bytes free on the disk."""
        space = disk.space(self._where)
        return 0 if space is None else space.free

    def read_beside(self, path: str, most: int) -> bytes | None:
        """A small file of the run that belongs to no checkpoint; None when there is none."""
        self._expect_mounted()
        try:
            with open(os.path.join(os.path.dirname(self._folder), path), "rb") as opened:
                return opened.read(most)
        except FileNotFoundError:
            return None

    def write_beside(self, path: str, data: bytes) -> None:
        """The same, written."""
        self._make(self._folder)
        _write_whole(os.path.join(os.path.dirname(self._folder), path), data)

    def _prepare(self, name: str, file: str) -> str:
        self._make(os.path.join(self._folder, name))
        return os.path.join(self._folder, name, file)

    def _make(self, folder: str) -> None:
        self._expect_mounted()
        is_first = not os.path.isdir(self._folder)
        os.makedirs(folder, exist_ok=True)
        if is_first:
            for above in (os.path.dirname(self._folder), self._where):
                _sync(above)

    def _expect_mounted(self) -> None:
        """A drive that was unmounted leaves an empty folder: writing there would fill the machine's own disk."""
        if self._mount is not None and not os.path.ismount(self._mount):
            raise OSError(errno.ENOTCONN, "it is no longer mounted")
        if is_missing_drive(self._where):
            raise OSError(errno.ENOTCONN, "Google Drive is not mounted")


def is_drive(path: str) -> bool:
    """Whether files deleted here go to a trash that counts against a quota: Google Drive's mount."""
    real = os.path.realpath(path)
    return real.startswith("/content/drive/") or disk.filesystem_type(path) in (
        "fuse",
        "fuse.drive",
        "fuse.drivefs",
    )


def is_missing_drive(path: str) -> bool:
    """Whether the path means Google Drive in Colab, and it is not mounted."""
    return os.path.abspath(path).startswith("/content/drive/") and not os.path.ismount("/content/drive")


def mount_point(path: str) -> str:
    """Where the file system of this path, which need not exist yet, is mounted."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _good_start(path: str, pieces: Pieces) -> tuple[int, Pieces]:
    """How many bytes of a copy are as they should be, and the pieces that are not."""
    done = 0
    with open(path, "rb") as file:
        for number, (length, crc) in enumerate(pieces):
            data = file.read(length)
            if len(data) != length or zlib.crc32(data) != crc:
                return done, pieces[number:]
            done += length
    return done, ()


def _write_whole(target: str, data: bytes) -> None:
    with open(target + ".part", "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(target + ".part", target)


def _sync(folder: str) -> None:
    try:
        sync_folder(folder)
    except PermissionError:
        pass  # a share that lets nobody open its folders keeps their names by itself


def _unlink_quietly(path: str, truncate: bool) -> None:
    try:
        if truncate:
            os.truncate(path, 0)
        os.unlink(path)
    except OSError:
        pass
