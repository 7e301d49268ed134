"""What both kinds of second home do with bytes: read them as they were written, pour them, and say what went wrong."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO

CHUNK = 8 << 20
IS_CHECKPOINT = re.compile(r"step-[0-9]{9,18}(\.[0-9]{1,9})?")

Progress = Callable[[int], object]
"""Told how many bytes have moved since it was last told; raises to give up."""
Pieces = Sequence[tuple[int, int]]
"""(length, checksum) of a file's parts, as the manifest has them."""


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
