"""What a mirror holds, and what a place must be able to do to be one: a folder (`folder.py`) or a URL (`url.py`).

Both hold checkpoints as folders of the same plain files. Data goes first and the manifest last, so that what has a
manifest whose sizes fit is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Protocol

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
from buoy.checkpoint.reader import decode_about, read_manifest
from buoy.checkpoint.unusable import DAMAGED, HALF, NEWER, Unusable
from buoy.errors import BuoyError, UsageError

STATUS, STATUS_SCHEMA = "mirror.json", "buoy.mirror/1"
"""In the run folder: what the mirror's process says of itself."""
LOCK = "mirror.lock"
"""Held by the one process that copies."""
CHUNK = 8 << 20
IS_CHECKPOINT = re.compile(r"step-[0-9]{9,18}(\.[0-9]{1,9})?")

Progress = Callable[[int], object]
"""Receives how many bytes have moved since the last call; raises to give up."""
Pieces = Sequence[tuple[int, int]]
"""(length, checksum) of a file's parts, as the manifest has them."""


class Storage(Protocol):
    """Where the checkpoints of one run lie by name. Every failure is an OSError."""

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
            "cannot tell which folder the mirror is",
            received=f"mirror={where!r}",
            expected="a folder's path, or file:// before one that begins with /",
            hint=f"`mirror={os.path.abspath(rest)!r}`",
        )
    return os.path.abspath(rest if is_named else os.path.expanduser(where))


def open_storage(where: str, run: str, mount: str | None = None, *, anyones: bool = False) -> Storage:
    """The place of one run's checkpoints below `where`; `anyones`: also where another user made them."""
    if is_url(where):
        from buoy.checkpoint.mirror.url import UrlStorage

        return UrlStorage(where, run)
    from buoy.checkpoint.mirror.folder import FolderStorage

    return FolderStorage(where, run, mount, anyones=anyones)


class Copy:
    """A checkpoint, here or in the mirror, as retention sees it."""

    def __init__(self, name: str, fields: dict[str, Any], size: int) -> None:
        about = decode_about(fields)
        if about is None:
            raise ValueError("nothing about it")
        self.name = name
        self.fields = fields
        self.step = int(fields["step"])
        self.about: dict[str, object] = about
        self.time = saved_at(about)
        self.bytes = size
        self.complete = True
        self.digest = digest_of(fields)
        """Its content: the manifest has the checksum of every byte."""

    @property
    def key(self) -> tuple[str, str]:
        """Which one it is, among those of the same name that several lives of a run may make."""
        return self.name, self.digest

    @property
    def age(self) -> tuple[int, float]:
        """The newest is the greatest."""
        return self.step, self.time or 0.0


def digest_of(fields: dict[str, Any]) -> str:
    """What tells a checkpoint from any other, by the fields of its manifest."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def is_there(folder: str, digests: dict[str, object]) -> bool:
    """Whether the checkpoint in this folder is the one that a mirror holds under its name (name -> digest)."""
    expected = digests.get(os.path.basename(folder))
    try:
        return expected is not None and digest_of(read_manifest(folder)[0]) == expected
    except (OSError, BuoyError):
        return False


def survey(storage: Storage) -> tuple[list[Copy], list[Unusable]]:
    """The complete checkpoints there (by manifest and sizes), newest first, and what is there besides."""
    found, unusable = [], []
    for name, sizes in storage.sizes().items():
        try:
            found.append(_look_at(storage, name, sizes))
        except FileNotFoundError:
            continue  # removed since it was listed
        except _NoCopy as no_copy:
            unusable.append(Unusable(step_of(name), name, no_copy.what, no_copy.fault))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP):
                raise
            # A pipe, a device, a link: nothing that a copy could be.
            unusable.append(Unusable(step_of(name), name, f"{MANIFEST}: {error.strerror}"))
    return sorted(found, key=lambda copy: copy.age, reverse=True), unusable


def is_half(sizes: dict[str, int]) -> bool:
    """Whether these files are a copy that was not finished: the manifest comes last, and goes first."""
    return MANIFEST not in sizes


def step_of(name: str) -> int:
    """The step in a checkpoint's name.

    >>> step_of("step-000000042.2")
    42
    """
    return int(name.removeprefix("step-").partition(".")[0])


class _NoCopy(Exception):  # noqa: N818 - says what it is
    def __init__(self, what: str, fault: str = DAMAGED) -> None:
        self.what, self.fault = what, fault


def _look_at(storage: Storage, name: str, sizes: dict[str, int]) -> Copy:
    if is_half(sizes):
        raise _NoCopy(f"{MANIFEST} is not there: its copying was not finished", HALF)
    try:
        fields = unseal(storage.read(name, MANIFEST, MOST_MANIFEST_BYTES), name)
        if fields["step"] != step_of(name):
            raise ValueError(f"it is of step {fields['step']}")
        for file in (STATE, VALUES):
            found, expected = sizes.get(file), size_of(fields, file)
            if found is None:
                raise _NoCopy(f"{file}: it is not there")
            if found != expected:
                raise _NoCopy(f"{file}: {found} of {expected} bytes are there")
        return Copy(name, fields, sum(sizes.values()))
    except NewerCheckpoint as error:
        raise _NoCopy(f"{MANIFEST}: {error.received}", NEWER) from None
    except BuoyError as error:
        raise _NoCopy(error.received or error.message) from None
    except ValueError as error:
        raise _NoCopy(f"{MANIFEST}: {error}") from None


def as_written(reading: IO[bytes], pieces: Pieces, file: str) -> Iterator[bytes]:
    """A local file's pieces, each compared with its checksum: damage must not be copied and called safe."""
    for length, crc in pieces:
        piece = reading.read(length)
        if zlib.crc32(piece) != crc:
            raise DamagedSource(errno.EIO, f"{file}: its checksum does not fit")
        yield piece


def pour(reading: IO[bytes], writing: IO[bytes], progress: Progress) -> None:
    """Copy to the end, and onto the disk."""
    while chunk := reading.read(CHUNK):
        writing.write(chunk)
        progress(len(chunk))
    writing.flush()
    os.fsync(writing.fileno())


def expect_size(found: int, expected: int, file: str) -> None:
    """Raise `Altered` where not all of the file has arrived."""
    if found != expected:
        raise Altered(errno.EIO, f"{file} arrived with {found} of {expected} bytes")


class Altered(OSError):  # noqa: N818 - says what happened
    """What arrived is not what was sent."""


class DamagedSource(OSError):  # noqa: N818 - says what happened
    """The local file is not as it was written."""


class GiveUp(Exception):  # noqa: N818 - not an error: the copy is no longer wanted
    """Raised by a progress function to end a copy."""
