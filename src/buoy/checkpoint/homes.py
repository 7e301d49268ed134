"""The two kinds of second home: a folder, mostly a mounted drive, and whatever fsspec reaches by a URL.

Both hold checkpoints as folders of the same plain files. Data goes first and the manifest last, so that what has a
manifest whose sizes fit is complete. Runs in the mirror's own process, and imports fsspec only for a URL.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Protocol

from buoy.checkpoint.commit import remove_folder
from buoy.machine import disk

CHUNK = 8 << 20
_PART = 16 << 20
"""Bytes of one part of an upload, held in memory: S3 takes 10,000 of them."""
_IS_CHECKPOINT = re.compile(r"step-\d{9,}(\.\d+)?")
_MD5 = re.compile(r"[0-9a-f]{32}")

Progress = Callable[[int], object]
"""Told how many bytes have moved since it was last told; raises to give up."""
Pieces = Sequence[tuple[int, int]]
"""(length, checksum) of a file's parts, as the manifest has them."""


class Home(Protocol):
    """A place that holds checkpoints by name. Every failure is an OSError."""

    def sizes(self) -> dict[str, dict[str, int]]:
        """The files of each checkpoint and their sizes."""

    def read(self, name: str, file: str, most: int) -> bytes:
        """A small file, whole."""

    def write(self, name: str, file: str, data: bytes) -> None:
        """A small file, whole or not at all."""

    def put(self, source: str, name: str, file: str, pieces: Pieces, progress: Progress) -> None:
        """Copy a local file there and verify it as far as the place allows."""

    def holds(self, source: str, name: str, file: str, pieces: Pieces) -> bool:
        """Whether what is there now is this local file, as far as the place lets one tell."""

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""

    def remove(self, name: str) -> None:
        """Remove one checkpoint."""

    def free(self) -> int:
        """Bytes free there, as far as the place tells; else 0."""

    def read_beside(self, path: str, most: int) -> bytes | None:
        """A small file of the run that belongs to no checkpoint; None when there is none."""

    def write_beside(self, path: str, data: bytes) -> None:
        """The same, written."""


def is_url(where: str) -> bool:
    """Whether this is for fsspec, not a path."""
    return "://" in where


def open_home(where: str, run_name: str, mount: str | None = None) -> Home:
    """The home of one run's checkpoints below `where`."""
    return UrlHome(where, run_name) if is_url(where) else FolderHome(where, run_name, mount)


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
        for name in filter(_IS_CHECKPOINT.fullmatch, names):
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
        """A small file, whole or not at all."""
        _write_whole(self._prepare(name, file), data)

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
                for chunk in _as_written(reading, rest, file):
                    writing.write(chunk)
                    progress(len(chunk))
                writing.flush()
                os.fsync(writing.fileno())
            _expect_size(os.stat(part).st_size, os.stat(source).st_size, file)
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
            _pour(reading, writing, progress)

    def remove(self, name: str) -> None:
        """Remove one checkpoint: first its manifest, so that no half of it looks whole."""
        folder = os.path.join(self._folder, name)
        _unlink_quietly(os.path.join(folder, "manifest.json"), self._drive)
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
        self._expect_mounted()
        os.makedirs(self._folder, exist_ok=True)
        _write_whole(os.path.join(os.path.dirname(self._folder), path), data)

    def _prepare(self, name: str, file: str) -> str:
        self._expect_mounted()
        os.makedirs(os.path.join(self._folder, name), exist_ok=True)
        return os.path.join(self._folder, name, file)

    def _expect_mounted(self) -> None:
        """A drive that was unmounted leaves an empty folder: writing there would fill the machine's own disk."""
        if self._mount is not None and not os.path.ismount(self._mount):
            raise OSError(errno.ENOTCONN, "it is no longer mounted")
        if is_missing_drive(self._where):
            raise OSError(errno.ENOTCONN, "Google Drive is not mounted")


class UrlHome:
    """Whatever fsspec reaches: `s3://`, `gs://`, `hf://`, ..."""

    def __init__(self, where: str, run_name: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped,unused-ignore]

        self._fs, path = url_to_fs(where)
        self._folder = f"{path.rstrip('/')}/{run_name}/checkpoints"
        self._etag_is_md5 = True

    def sizes(self) -> dict[str, dict[str, int]]:
        """The files of each checkpoint and their sizes."""
        with _as_os_error():
            self._fs.invalidate_cache()
            try:
                listed = self._fs.find(self._folder, detail=True)
            except FileNotFoundError:
                return {}
            found: dict[str, dict[str, int]] = {}
            for path, info in listed.items():
                name, _, file = path[path.rindex(self._folder) + len(self._folder) + 1 :].partition("/")
                if _IS_CHECKPOINT.fullmatch(name) and file and "/" not in file:
                    found.setdefault(name, {})[file] = int(info.get("size") or 0)
            return found

    def read(self, name: str, file: str, most: int) -> bytes:
        """A small file, whole."""
        with _as_os_error(), self._fs.open(self._path(name, file), "rb") as opened:
            return bytes(opened.read(most))

    def write(self, name: str, file: str, data: bytes) -> None:
        """A small file, whole or not at all."""
        with _as_os_error():
            self._fs.pipe_file(self._path(name, file), data)
            self._verify(name, file, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def put(self, source: str, name: str, file: str, pieces: Pieces, progress: Progress) -> None:
        """Copy a local file there, in parts where it is large, and compare what the store says of it."""
        md5 = hashlib.md5(usedforsecurity=False)
        with _as_os_error(), open(source, "rb") as reading:
            writing = self._fs.open(self._path(name, file), "wb", block_size=_PART)
            try:
                for chunk in _as_written(reading, pieces, file):
                    md5.update(chunk)
                    writing.write(chunk)
                    progress(len(chunk))
                writing.close()
            except BaseException:
                _throw_away(writing)  # closing it would publish half a file
                raise
            self._verify(name, file, os.stat(source).st_size, md5.hexdigest())

    def holds(self, source: str, name: str, file: str, pieces: Pieces) -> bool:
        """Whether size and checksum that the store tells are those of the local file."""
        md5 = hashlib.md5(usedforsecurity=False)
        with open(source, "rb") as reading:
            for chunk in _as_written(reading, pieces, file):
                md5.update(chunk)
        with _as_os_error():
            try:
                self._verify(name, file, os.stat(source).st_size, md5.hexdigest())
            except (FileNotFoundError, Altered):
                return False
        return True

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""
        with (
            _as_os_error(),
            self._fs.open(self._path(name, file), "rb") as reading,
            open(target, "xb") as writing,
        ):
            _pour(reading, writing, progress)

    def remove(self, name: str) -> None:
        """Remove one checkpoint: first its manifest, so that no half of it looks whole."""
        with _as_os_error():
            if self._fs.exists(self._path(name, "manifest.json")):
                self._fs.rm_file(self._path(name, "manifest.json"))
            self._fs.rm(f"{self._folder}/{name}", recursive=True)

    def free(self) -> int:
        """No store tells."""
        return 0

    def read_beside(self, path: str, most: int) -> bytes | None:
        """A small file of the run that belongs to no checkpoint; None when there is none."""
        with _as_os_error():
            try:
                return bytes(self._fs.cat_file(f"{self._folder.rpartition('/')[0]}/{path}", end=most))
            except FileNotFoundError:
                return None

    def write_beside(self, path: str, data: bytes) -> None:
        """A small file of the run that belongs to no checkpoint: `attempts/0001/events.jsonl`."""
        with _as_os_error():
            self._fs.pipe_file(f"{self._folder.rpartition('/')[0]}/{path}", data)

    def _path(self, name: str, file: str) -> str:
        return f"{self._folder}/{name}/{file}"

    def _verify(self, name: str, file: str, size: int, md5: str) -> None:
        """By the size, and by the checksum where the store gives one: S3's of one part, Google's `md5Hash`."""
        path = self._path(name, file)
        self._fs.invalidate_cache()
        info = self._fs.info(path)
        _expect_size(int(info.get("size") or 0), size, file)
        if (google := info.get("md5Hash")) and b64decode(str(google)).hex() != md5:
            raise Altered(errno.EIO, f"{file} arrived with another checksum")
        etag = str(info.get("ETag") or "").strip('"')
        if not self._etag_is_md5 or not _MD5.fullmatch(etag) or etag == md5:
            return
        # With some encryptions the ETag is no checksum: let the bytes themselves decide, once.
        with self._fs.open(path, "rb") as opened:
            if not _reads_as(opened, md5):
                raise Altered(errno.EIO, f"{file} arrived with another checksum")
        self._etag_is_md5 = False


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


def _as_written(reading: IO[bytes], pieces: Pieces, file: str) -> Iterator[bytes]:
    """A local file's pieces, each compared with its checksum: damage must not be copied and called safe."""
    for length, crc in pieces:
        piece = reading.read(length)
        if zlib.crc32(piece) != crc:
            raise DamagedSource(errno.EIO, f"{file}: its checksum does not fit")
        yield piece


def _pour(reading: IO[bytes], writing: IO[bytes], progress: Progress) -> None:
    while chunk := reading.read(CHUNK):
        writing.write(chunk)
        progress(len(chunk))
    writing.flush()
    os.fsync(writing.fileno())


def _expect_size(found: int, expected: int, file: str) -> None:
    if found != expected:
        raise Altered(errno.EIO, f"{file} arrived with {found} of {expected} bytes")


def _reads_as(opened: IO[bytes], md5: str) -> bool:
    found = hashlib.md5(usedforsecurity=False)
    while chunk := opened.read(CHUNK):
        found.update(chunk)
    return found.hexdigest() == md5


def _write_whole(target: str, data: bytes) -> None:
    with open(target + ".part", "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(target + ".part", target)


def _unlink_quietly(path: str, truncate: bool) -> None:
    try:
        if truncate:
            os.truncate(path, 0)
        os.unlink(path)
    except OSError:
        pass


def _throw_away(writing: Any) -> None:
    try:
        writing.discard()
        writing.closed = True
    except Exception:  # noqa: BLE001 - an unfinished upload is invisible; the store forgets it in time
        pass


class _as_os_error:  # noqa: N801 - reads as a statement
    """Whatever a store's library raises becomes an OSError with its words."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, OSError | GiveUp):
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}"[:300]) from error


class Altered(OSError):  # noqa: N818 - says what happened
    """What arrived is not what was sent."""


class DamagedSource(OSError):  # noqa: N818 - says what happened
    """The local file is not as it was written."""


class GiveUp(Exception):  # noqa: N818 - not an error: the copy is no longer wanted
    """Raised by a progress function to end a copy."""
