"""The places that can be a mirror (a folder, or a URL that only fsspec reaches) and what they hold.

Both hold checkpoints as folders of the same plain files, and fail with an OSError. Data goes first and the manifest
last, so that what has a manifest whose sizes fit is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from buoy.checkpoint.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    STATE,
    VALUES,
    NewerCheckpoint,
    saved_at,
    size_of,
    unseal,
)
from buoy.checkpoint.reader import decode_about
from buoy.checkpoint.retention import age
from buoy.checkpoint.store import DAMAGED, HALF, NEWER, Entry, Unusable
from buoy.errors import BuoyError, UsageError
from buoy.machine import disk, files
from buoy.machine.disk import SharedFolder

STATUS, STATUS_SCHEMA = "mirror.json", "buoy.mirror/1"
"""In the run folder: what the mirror's process says of itself."""
LOCK = "mirror.lock"
"""Held by the one process that copies."""
_CHUNK = 8 << 20
_PART = 16 << 20
"""Bytes of one part of an upload, held in memory: S3 takes 10,000 of them."""
_CHECKPOINTS = "checkpoints"
_IS_CHECKPOINT = re.compile(r"step-[0-9]{9,18}(\.[0-9]{1,9})?")
_MD5 = re.compile(r"[0-9a-f]{32}")

Progress = Callable[[int], object]
"""Receives how many bytes have moved since the last call."""
Pieces = Sequence[tuple[int, int]]
"""(length, checksum) of a file's parts, as the manifest has them."""


class DamagedSource(OSError):  # noqa: N818 - says what happened
    """The local file is not as it was written."""


def is_url(where: str) -> bool:
    """Whether this is for fsspec, not a path."""
    return "://" in where


def place_of(where: str) -> str:
    """The place as the mirror's process knows it: a URL, or a folder's whole path, which `file://` means too.

    >>> place_of("file:///content/drive/MyDrive/runs")
    '/content/drive/MyDrive/runs'
    >>> place_of("s3://bucket/runs")
    's3://bucket/runs'
    """
    protocol, is_named, rest = where.partition("://")
    if is_named and protocol not in ("file", "local"):
        return where
    if is_named and not rest.startswith("/"):
        raise UsageError(
            "cannot tell which folder is the mirror",
            received=f"mirror={where!r}",
            expected="a folder's path, or file:// before one that begins with /",
            hint=f"`mirror={os.path.abspath(rest)!r}`",
        )
    return os.path.abspath(rest if is_named else os.path.expanduser(where))


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
        for name in filter(_IS_CHECKPOINT.fullmatch, names):
            try:
                with self._tree.open(_CHECKPOINTS, name) as folder, os.scandir(folder) as entries:
                    found[name] = {
                        entry.name: entry.stat(follow_symlinks=False).st_size
                        for entry in entries
                        # A link or a pipe too: a copy whose manifest is one is damaged, and no half to be tidied up.
                        if not entry.is_dir(follow_symlinks=False)
                    }
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed since it was listed, or nothing of ours
        return found

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
        """Copy a local file there; what cannot be finished leaves nothing."""
        self._sync_if_first()
        part = file + ".part"
        with self._tree.open(_CHECKPOINTS, name, make=True) as folder:
            with suppress(FileNotFoundError):
                files.remove_file(part, truncate=self._drive, folder=folder)
            writing = files.open_new(part, folder=folder)
            try:
                with os.fdopen(files.open_regular(source), "rb") as reading:
                    for chunk in _as_written(reading, pieces, file):
                        files.write_all(writing, chunk)
                        progress(len(chunk))
                    os.fsync(writing)
                    _expect_size(os.fstat(writing).st_size, os.fstat(reading.fileno()).st_size, file)
            except BaseException:
                with suppress(OSError):
                    files.remove_file(part, truncate=self._drive, folder=folder)
                raise
            finally:
                os.close(writing)
            files.rename(part, file, folder=folder)

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""
        with (
            self._tree.open(_CHECKPOINTS, name) as folder,
            os.fdopen(files.open_regular(file, folder=folder), "rb") as reading,
        ):
            _pour(reading, target, progress)

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


class UrlStorage:
    """Whatever fsspec reaches: `s3://`, `gs://`, `hf://`, ... Imports fsspec."""

    def __init__(self, where: str, run: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped,unused-ignore]

        self._fs, path = url_to_fs(where)
        self._run = f"{path.rstrip('/')}/{run}"
        self._etag_is_md5 = True

    def sizes(self) -> dict[str, dict[str, int]]:
        """The files of each checkpoint and their sizes."""
        folder = f"{self._run}/{_CHECKPOINTS}"
        with _os_errors():
            self._fs.invalidate_cache()
            try:
                listed = self._fs.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            found: dict[str, dict[str, int]] = {}
            for path, info in listed.items():
                name, _, file = path[path.rindex(folder) + len(folder) + 1 :].partition("/")
                if _IS_CHECKPOINT.fullmatch(name) and file and "/" not in file:
                    found.setdefault(name, {})[file] = int(info.get("size") or 0)
            return found

    def read(self, name: str, file: str, most: int) -> bytes:
        """A small file, whole."""
        with _os_errors(), self._fs.open(self._path(name, file), "rb") as opened:
            return bytes(opened.read(most))

    def write(self, name: str, file: str, data: bytes) -> None:
        """A small file, whole or not at all."""
        with _os_errors():
            self._fs.pipe_file(self._path(name, file), data)
            self._verify(name, file, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def put(self, source: str, name: str, file: str, pieces: Pieces, progress: Progress) -> None:
        """Copy a local file there, in parts where it is large, and compare what the store says of it."""
        md5 = hashlib.md5(usedforsecurity=False)
        with _os_errors(), os.fdopen(files.open_regular(source), "rb") as reading:
            writing = self._fs.open(self._path(name, file), "wb", block_size=_PART)
            try:
                for chunk in _as_written(reading, pieces, file):
                    md5.update(chunk)
                    writing.write(chunk)
                    progress(len(chunk))
                writing.close()
            except BaseException:
                with suppress(Exception):  # closing it would publish half a file
                    writing.discard()
                    writing.closed = True
                raise
            self._verify(name, file, os.stat(source).st_size, md5.hexdigest())

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""
        with _os_errors(), self._fs.open(self._path(name, file), "rb") as reading:
            _pour(reading, target, progress)

    def remove(self, name: str) -> None:
        """Remove one checkpoint: first its manifest, so that no half of it looks whole."""
        with _os_errors():
            if self._fs.exists(self._path(name, MANIFEST)):
                self._fs.rm_file(self._path(name, MANIFEST))
            self._fs.rm(f"{self._run}/{_CHECKPOINTS}/{name}", recursive=True)

    def read_beside(self, path: str, most: int) -> bytes | None:
        """A small file of the run that belongs to no checkpoint; None when there is none."""
        with _os_errors():
            try:
                return bytes(self._fs.cat_file(f"{self._run}/{path}", end=most))
            except FileNotFoundError:
                return None

    def write_beside(self, path: str, data: bytes) -> None:
        """The same, written: `attempts/0001/events.jsonl`."""
        with _os_errors():
            self._fs.pipe_file(f"{self._run}/{path}", data)

    def _path(self, name: str, file: str) -> str:
        return f"{self._run}/{_CHECKPOINTS}/{name}/{file}"

    def _verify(self, name: str, file: str, size: int, md5: str) -> None:
        """By the size, and by the checksum where the store gives one: S3's of one part, Google's `md5Hash`."""
        path = self._path(name, file)
        self._fs.invalidate_cache()
        info = self._fs.info(path)
        _expect_size(int(info.get("size") or 0), size, file)
        google, etag = info.get("md5Hash"), str(info.get("ETag") or "").strip('"')
        is_other = bool(google) and b64decode(str(google)).hex() != md5
        if not is_other and self._etag_is_md5 and _MD5.fullmatch(etag) and etag != md5:
            # With some encryptions the ETag is no checksum: let the bytes themselves decide, once.
            with self._fs.open(path, "rb") as opened:
                found = hashlib.md5(usedforsecurity=False)
                while chunk := opened.read(_CHUNK):
                    found.update(chunk)
            is_other = found.hexdigest() != md5
            self._etag_is_md5 = is_other
        if is_other:
            raise OSError(errno.EIO, f"{file} arrived with a different checksum")


Storage = FolderStorage | UrlStorage
"""Where the checkpoints of one run lie by name."""


def open_storage(where: str, run: str, mount: str | None = None, *, anyones: bool = False) -> Storage:
    """The place of one run's checkpoints below `where`; `anyones`: also where another user made them."""
    return UrlStorage(where, run) if is_url(where) else FolderStorage(where, run, mount, anyones=anyones)


def is_drive(path: str) -> bool:
    """Whether files deleted here go to a trash that counts against a quota: Google Drive's mount."""
    real = os.path.realpath(path)
    return real.startswith("/content/drive/") or disk.filesystem_type(path) in (
        "fuse",
        "fuse.drive",
        "fuse.drivefs",
    )


def _as_written(reading: IO[bytes], pieces: Pieces, file: str) -> Iterator[bytes]:
    """A local file's pieces, each compared with its checksum: damage must not be copied and called safe."""
    for length, crc in pieces:
        piece = reading.read(length)
        if zlib.crc32(piece) != crc:
            raise DamagedSource(errno.EIO, f"{file}: its checksum does not match")
        yield piece


def _pour(reading: IO[bytes], target: str, progress: Progress) -> None:
    """Into a new file, and onto the disk."""
    with os.fdopen(files.open_new(target), "wb") as writing:
        while chunk := reading.read(_CHUNK):
            writing.write(chunk)
            progress(len(chunk))
        writing.flush()
        os.fsync(writing.fileno())


def _expect_size(found: int, expected: int, file: str) -> None:
    if found != expected:
        raise OSError(errno.EIO, f"{file} arrived with {found} of {expected} bytes")


def _sync(folder: files.Folder) -> None:
    with suppress(PermissionError):  # a share that lets nobody open its folders keeps their names by itself
        files.sync_folder(folder)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Whatever a store's library raises becomes an OSError with its words."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}"[:300]) from error


def survey(storage: Storage) -> tuple[list[Entry], list[Unusable]]:
    """The complete checkpoints there (by manifest and sizes), newest first, and what is there besides."""
    found, unusable = [], []
    for name, sizes in storage.sizes().items():
        try:
            one = _look_at(storage, name, sizes)
        except FileNotFoundError:
            continue  # removed since it was listed
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP):
                raise
            # A pipe, a device, a link: nothing that a copy could be.
            one = Unusable(step_of(name), name, f"{MANIFEST}: {error.strerror}")
        if isinstance(one, Entry):
            found.append(one)
        else:
            unusable.append(one)
    return sorted(found, key=age, reverse=True), unusable


def is_half(sizes: dict[str, int]) -> bool:
    """Whether these files are a copy that was not finished: the manifest comes last, and goes first."""
    return MANIFEST not in sizes


def step_of(name: str) -> int:
    """The step in a checkpoint's name.

    >>> step_of("step-000000042.2")
    42
    """
    return int(name.removeprefix("step-").partition(".")[0])


def _look_at(storage: Storage, name: str, sizes: dict[str, int]) -> Entry | Unusable:
    step, fault = step_of(name), DAMAGED
    if is_half(sizes):
        return Unusable(step, name, f"{MANIFEST} is missing: the copy was not finished", HALF)
    try:
        fields = unseal(storage.read(name, MANIFEST, MOST_MANIFEST_BYTES), name)
        if fields["step"] != step:
            raise ValueError(f"it belongs to step {fields['step']}")
        for file in (STATE, VALUES):
            found, expected = sizes.get(file), size_of(fields, file)
            if found is None:
                return Unusable(step, name, f"{file}: it is missing")
            if found != expected:
                return Unusable(step, name, f"{file}: it has {found} bytes, expected {expected}")
        about = decode_about(fields)
        if about is None:
            raise ValueError("its description is missing")
        return Entry(step, name, saved_at(about), sum(sizes.values()), about, True, fields)
    except NewerCheckpoint as error:
        what, fault = f"{MANIFEST}: {error.received}", NEWER
    except BuoyError as error:
        what = error.received or error.message
    except ValueError as error:
        what = f"{MANIFEST}: {error}"
    return Unusable(step, name, what, fault)
