"""A mirror that is a folder: on another disk, a network share, or mostly a mounted drive."""

from __future__ import annotations

import errno
import os
import zlib
from contextlib import suppress
from typing import IO

from buoy.checkpoint.manifest import MANIFEST
from buoy.checkpoint.mirror.storage import IS_CHECKPOINT, Pieces, Progress, as_written, expect_size, pour
from buoy.machine import disk, files
from buoy.machine.disk import SharedFolder

_CHECKPOINTS = "checkpoints"


class FolderStorage:
    """A folder on another disk or a mounted drive. Others may write beside it: it is a `SharedFolder`."""

    def __init__(self, where: str, run: str, mount: str | None = None, *, anyones: bool = False) -> None:
        """`mount` and `anyones`: as for a `SharedFolder`."""
        self._where = where
        self._tree = SharedFolder(where, run, mount, anyones=anyones)
        self._drive = is_drive(where)

    def sizes(self) -> dict[str, dict[str, int]]:
        """The files of each checkpoint and their sizes."""
        found: dict[str, dict[str, int]] = {}
        try:
            with self._tree.open(_CHECKPOINTS) as folder:
                names = os.listdir(folder)
        except FileNotFoundError:
            return {}
        for name in filter(IS_CHECKPOINT.fullmatch, names):
            try:
                found[name] = self._sizes_of(name)
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed since it was listed, or nothing of ours
        return found

    def _sizes_of(self, name: str) -> dict[str, int]:
        with self._tree.open(_CHECKPOINTS, name) as folder, os.scandir(folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.is_file(follow_symlinks=False)
            }

    def read(self, name: str, file: str, most: int) -> bytes:
        """A small file, whole."""
        with self._tree.open(_CHECKPOINTS, name) as folder:
            return files.read_bounded(file, most, folder=folder)

    def write(self, name: str, file: str, data: bytes) -> None:
        """A small file, whole or not at all, and on the disk with all that was put before it."""
        with self._tree.open(_CHECKPOINTS, name, make=True) as folder:
            _sync(folder)  # else a power cut could leave this file beside others that have lost their names
            files.write_whole(file, data, sync=True, folder=folder)
            _sync(folder)
        with self._tree.open(_CHECKPOINTS) as folder:
            _sync(folder)

    def put(self, source: str, name: str, file: str, pieces: Pieces, progress: Progress) -> None:
        """Copy a local file there; what an interrupted copy left is checked and gone on from."""
        self._sync_if_first()
        part = file + ".part"
        with self._tree.open(_CHECKPOINTS, name, make=True) as folder:
            try:
                writing = _open_part(part, folder)
                try:
                    with os.fdopen(files.open_regular(source), "rb") as reading:
                        done, rest = _good_start(writing, pieces)
                        os.ftruncate(writing, done)
                        os.lseek(writing, done, os.SEEK_SET)
                        reading.seek(done)
                        progress(done)
                        for chunk in as_written(reading, rest, file):
                            files.write_all(writing, chunk)
                            progress(len(chunk))
                        os.fsync(writing)
                        expect_size(os.fstat(writing).st_size, os.fstat(reading.fileno()).st_size, file)
                finally:
                    os.close(writing)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):  # a full place is not helped by half a file
                    with suppress(OSError):
                        files.remove_file(part, truncate=self._drive, folder=folder)
                raise
            files.rename(part, file, folder=folder)

    def holds(self, source: str, name: str, file: str, pieces: Pieces) -> bool:
        """Whether every byte there is as the manifest has it."""
        try:
            with self._tree.open(_CHECKPOINTS, name) as folder, _open_there(file, folder) as reading:
                done, rest = _good_start(reading.fileno(), pieces)
                return not rest and os.fstat(reading.fileno()).st_size == done
        except FileNotFoundError:
            return False

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""
        with (
            self._tree.open(_CHECKPOINTS, name) as folder,
            _open_there(file, folder) as reading,
            os.fdopen(files.open_new(target), "wb") as writing,
        ):
            pour(reading, writing, progress)

    def remove(self, name: str) -> None:
        """Remove one checkpoint: first its manifest by one rename, so that no half of it looks whole."""
        with self._tree.open(_CHECKPOINTS) as above:
            try:
                with self._tree.open(_CHECKPOINTS, name) as folder:
                    files.rename(MANIFEST, MANIFEST + ".gone", folder=folder)
                    _sync(folder)  # else a power cut could bring it back beside half of its files
            except FileNotFoundError:
                pass  # half a copy
            files.remove_folder(name, truncate=self._drive, folder=above)

    def free(self) -> int:
        """Bytes free on the disk."""
        space = disk.space(self._where)
        return 0 if space is None else space.free

    def read_beside(self, path: str, most: int) -> bytes | None:
        """A small file of the run that belongs to no checkpoint; None when there is none."""
        return self._tree.read(path, most)

    def write_beside(self, path: str, data: bytes) -> None:
        """The same, written."""
        self._sync_if_first()
        self._tree.write(path, data, sync=True)

    def _sync_if_first(self) -> None:
        """Make the folders of a new mirror durable by name, once."""
        try:
            with self._tree.open(_CHECKPOINTS):
                pass
        except FileNotFoundError:
            with self._tree.open(_CHECKPOINTS, make=True), self._tree.open() as folder:
                _sync(folder)
            _sync(self._where)


def is_drive(path: str) -> bool:
    """Whether files deleted here go to a trash that counts against a quota: Google Drive's mount."""
    real = os.path.realpath(path)
    return real.startswith("/content/drive/") or disk.filesystem_type(path) in (
        "fuse",
        "fuse.drive",
        "fuse.drivefs",
    )


def _open_there(file: str, folder: files.Folder) -> IO[bytes]:
    return os.fdopen(files.open_regular(file, folder=folder), "rb")


def _open_part(part: str, folder: files.Folder) -> int:
    """What an interrupted copy has left, or a new file."""
    try:
        return files.open_old(part, os.O_RDWR, folder=folder)
    except OSError:
        with suppress(FileNotFoundError):
            files.remove_file(part, folder=folder)  # a link, a pipe: nothing that we have left there
        return files.open_new(part, folder=folder)


def _good_start(descriptor: int, pieces: Pieces) -> tuple[int, Pieces]:
    """How many bytes of a copy are as they should be, and the pieces that are not."""
    done = 0
    for number, (length, crc) in enumerate(pieces):
        data = b""
        while len(data) < length and (more := os.pread(descriptor, length - len(data), done + len(data))):
            data += more
        if len(data) != length or zlib.crc32(data) != crc:
            return done, pieces[number:]
        done += length
    return done, ()


def _sync(folder: files.Folder) -> None:
    try:
        files.sync_folder(folder)
    except PermissionError:
        pass  # a share that lets nobody open its folders keeps their names by itself
