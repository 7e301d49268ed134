"""A mirror that only fsspec reaches, by a URL. Imports fsspec when one is opened."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from base64 import b64decode
from typing import IO, Any

from buoy.checkpoint.manifest import MANIFEST
from buoy.checkpoint.mirror.storage import (
    CHUNK,
    IS_CHECKPOINT,
    Altered,
    GiveUp,
    Pieces,
    Progress,
    as_written,
    expect_size,
    pour,
)
from buoy.machine import files

_PART = 16 << 20
"""Bytes of one part of an upload, held in memory: S3 takes 10,000 of them."""
_MD5 = re.compile(r"[0-9a-f]{32}")


class UrlStorage:
    """Whatever fsspec reaches: `s3://`, `gs://`, `hf://`, ..."""

    def __init__(self, where: str, run: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped,unused-ignore]

        self._fs, path = url_to_fs(where)
        self._folder = f"{path.rstrip('/')}/{run}/checkpoints"
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
                if IS_CHECKPOINT.fullmatch(name) and file and "/" not in file:
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
        with _as_os_error(), os.fdopen(files.open_regular(source), "rb") as reading:
            writing = self._fs.open(self._path(name, file), "wb", block_size=_PART)
            try:
                for chunk in as_written(reading, pieces, file):
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
        with os.fdopen(files.open_regular(source), "rb") as reading:
            for chunk in as_written(reading, pieces, file):
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
            os.fdopen(files.open_new(target), "wb") as writing,
        ):
            pour(reading, writing, progress)

    def remove(self, name: str) -> None:
        """Remove one checkpoint: first its manifest, so that no half of it looks whole."""
        with _as_os_error():
            if self._fs.exists(self._path(name, MANIFEST)):
                self._fs.rm_file(self._path(name, MANIFEST))
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
        expect_size(int(info.get("size") or 0), size, file)
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


def _reads_as(opened: IO[bytes], md5: str) -> bool:
    found = hashlib.md5(usedforsecurity=False)
    while chunk := opened.read(CHUNK):
        found.update(chunk)
    return found.hexdigest() == md5


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
