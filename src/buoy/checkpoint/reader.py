"""Reading a checkpoint: every byte is verified before anything is handed out.

Nothing of what is read is trusted: sizes are bounded, only plain files of the checkpoint's own folder are
opened, and links are not followed.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from buoy.checkpoint.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    PIECE_BYTES,
    STATE,
    VALUES,
    DamagedCheckpoint,
    pieces_of,
    size_of,
    unseal,
)
from buoy.checkpoint.state import ITEM_BYTES, BadTree, decode

_MOST_HEADER_BYTES = 100 << 20  # safetensors' own limit
_MOST_VALUES_BYTES = 1 << 30
_THREADS = 2
_AHEAD = 4  # blocks that the disk is asked for in advance
_BITE = 512 << 10  # read and checked at once: it stays in the processor's cache in between


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: memoryview
    """Its bytes in C order, mapped from the file: private and writable; copy what is to be kept."""
    order: tuple[int, ...] | None = None
    """How its dimensions lay in the training's memory, the outermost first; None: in C order too."""


class Checkpoint:
    """A checkpoint whose every byte was as written when it was opened."""

    def __init__(self, folder: str, fields: dict[str, object], values: object, state: _State) -> None:
        about = decode_about(fields)
        if about is None:
            raise DamagedCheckpoint(folder, MANIFEST, "nothing about it", "about")
        if not isinstance(values, dict):
            raise DamagedCheckpoint(folder, VALUES, "not a JSON object")
        self.folder = folder
        self.step = int(fields["step"])  # type: ignore[call-overload]
        self.about: dict[str, object] = about
        versions = fields.get("versions")
        self.versions: dict[str, object] = versions if isinstance(versions, dict) else {}
        self._values = values
        self._state = state

    @property
    def names(self) -> list[str]:
        """What was saved: `model`, `optimizer`, ..."""
        return list(self._values)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every stored tensor by its name in the file."""
        return {name: self._state.stored(name) for name in self._state.places}

    def value(self, name: str, tensor: Callable[[StoredTensor], object]) -> object:
        """A saved value; `tensor` makes the framework's own from each stored one.

        Once for each: what was one tensor under two names is one again, so that a write to it is seen under both.
        """
        made: dict[str, object] = {}

        def once(stored: str, order: object = None) -> object:
            if stored not in made:
                made[stored] = tensor(self._state.stored(stored, order))
            return made[stored]

        try:
            return decode(
                self._values[name],
                once,
                lambda stored: self._state.stored(stored).memory,
            )
        except (BadTree, RecursionError) as error:
            raise DamagedCheckpoint(self.folder, VALUES, f"{name!r} cannot be read: {error}") from None

    def __repr__(self) -> str:
        return f"<checkpoint of step {self.step} in {self.folder}>"


class _State:
    """`state.safetensors`, mapped."""

    def __init__(self, folder: str, memory: memoryview, header_bytes: int, header: dict[str, object]) -> None:
        self._folder = folder
        self._memory = memory
        self.places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        at = header_bytes
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, end) = _described(folder, name, entry)
            if header_bytes + start < at or header_bytes + end > len(memory):
                raise DamagedCheckpoint(folder, STATE, "lies outside the file", name)
            at = header_bytes + end
            self.places[name] = (dtype, shape, header_bytes + start, at)

    def stored(self, name: str, order: object = None) -> StoredTensor:
        """A tensor's bytes."""
        if name not in self.places:
            raise DamagedCheckpoint(self._folder, STATE, "is named and not there", name)
        dtype, shape, start, end = self.places[name]
        if order is None:
            return StoredTensor(name, dtype, shape, self._memory[start:end])
        places = [place for place in order if type(place) is int] if isinstance(order, list) else []
        if places != order or sorted(places) != [*range(len(shape))]:
            raise BadTree(f"{name!r} lay in an order that its dimensions do not have")
        return StoredTensor(name, dtype, shape, self._memory[start:end], tuple(places))


def read_manifest(folder: str) -> tuple[dict[str, object], int]:
    """A checkpoint's manifest, verified by itself, and its size in bytes."""
    where = _open_folder(folder)
    try:
        descriptor, size = _open_plain(folder, where, MANIFEST)
        try:
            if size > MOST_MANIFEST_BYTES:
                raise DamagedCheckpoint(folder, MANIFEST, f"{size} bytes are too many for one")
            return unseal(_read(descriptor, size), folder), size
        finally:
            os.close(descriptor)
    finally:
        os.close(where)


def decode_about(fields: dict[str, object]) -> dict[str, object] | None:
    """What a manifest says about its checkpoint; None when that cannot be read."""
    try:
        about = decode(fields["about"], _no_tensor)
    except (BadTree, RecursionError):
        return None
    return about if isinstance(about, dict) else None


def sizes_fit(folder: str, fields: dict[str, object]) -> bool:
    """Whether every file is there with its right size: cheap, and no proof of its bytes."""
    for name in (STATE, VALUES):
        try:
            found = os.lstat(os.path.join(folder, name))
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_of(fields, name):
            return False
    return True


def open_checkpoint(folder: str, progress: Callable[[int], object] | None = None) -> Checkpoint:
    """Verify every byte of a checkpoint and open it; `DamagedCheckpoint` names the file and the tensor.

    `progress` is told how many bytes have been verified since it was last told.
    """
    fields, _ = read_manifest(folder)
    where = _open_folder(folder)
    try:
        values = _read_values(folder, where, fields)
        state = _open_state(folder, where, fields, progress)
    finally:
        os.close(where)
    return Checkpoint(folder, fields, values, state)


def _read_values(folder: str, where: int, fields: dict[str, object]) -> object:
    descriptor, size = _open_plain(folder, where, VALUES)
    try:
        _expect_size(folder, VALUES, size, fields)
        if size > _MOST_VALUES_BYTES:
            raise DamagedCheckpoint(folder, VALUES, f"{size} bytes are too many")
        data = _read(descriptor, size)
    finally:
        os.close(descriptor)
    at = 0
    for length, crc in pieces_of(fields, VALUES):
        if zlib.crc32(data[at : at + length]) != crc:
            raise DamagedCheckpoint(folder, VALUES, "its checksum does not fit")
        at += length
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(folder, VALUES, f"not JSON: {error}") from None


def _open_state(
    folder: str, where: int, fields: dict[str, object], progress: Callable[[int], object] | None
) -> _State:
    descriptor, size = _open_plain(folder, where, STATE)
    try:
        bad = _verify(descriptor, pieces_of(fields, STATE), progress)
        header = _read_header(descriptor, size)
        if size != size_of(fields, STATE) or bad is not None:
            at = size if bad is None else bad
            what = (
                "its checksum does not fit" if size == size_of(fields, STATE) else _size_words(size, fields)
            )
            raise DamagedCheckpoint(folder, STATE, what, _name_at(header, at))
        if header is None:
            raise DamagedCheckpoint(folder, STATE, "no safetensors header", "header")
        # Private pages: a write to a handed-out tensor changes neither the file nor anyone else's view.
        memory = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
    return _State(folder, memory, *header)


def _verify(
    descriptor: int, pieces: list[tuple[int, int]], progress: Callable[[int], object] | None
) -> int | None:
    """The position of the first piece that is not as written; None when all are.

    Read, not mapped: a file that shrinks under a mapping kills the process that looks at it.
    """
    blocks = _blocks(pieces)
    numbers = iter(range(len(blocks)))  # whoever is free takes the next

    def check() -> int | None:
        room = memoryview(bytearray(_BITE))
        for number in numbers:
            # Asked for in time, a cold disk delivers twice as fast as the kernel's own guess makes it.
            for coming in blocks[number + (_AHEAD if number else 1) : number + _AHEAD + 1]:
                os.posix_fadvise(descriptor, coming.start, coming.size, os.POSIX_FADV_WILLNEED)
            bad = _first_bad(descriptor, blocks[number], room)
            if bad is not None:
                return bad
            if progress is not None:
                progress(blocks[number].size)
        return None

    if len(blocks) < _THREADS:
        return check()
    from concurrent.futures import (
        ThreadPoolExecutor,  # with all of `logging`: a list of checkpoints needs none
    )

    with ThreadPoolExecutor(_THREADS) as pool:
        asked = [pool.submit(check) for _ in range(_THREADS)]
        found = [at for at in (one.result() for one in asked) if at is not None]
    return min(found, default=None)


def _first_bad(descriptor: int, block: _Block, room: memoryview) -> int | None:
    """The position of the first piece that is not as written."""
    at = block.start
    for length, crc in block.pieces:
        found, done = 0, 0
        while done < length:
            bite = room[: min(len(room), length - done)]
            if _read_into(descriptor, bite, at + done) != len(bite):
                return at
            found = zlib.crc32(bite, found)
            done += len(bite)
        if found != crc:
            return at
        at += length
    return None


@dataclass(slots=True)
class _Block:
    """Neighbouring pieces that are read at once."""

    start: int
    size: int
    pieces: list[tuple[int, int]]


def _blocks(pieces: list[tuple[int, int]]) -> list[_Block]:
    blocks: list[_Block] = []
    at = 0
    for length, crc in pieces:
        if not blocks or blocks[-1].size + length > PIECE_BYTES:
            blocks.append(_Block(at, 0, []))
        blocks[-1].pieces.append((length, crc))
        blocks[-1].size += length
        at += length
    return blocks


def _read_header(descriptor: int, size: int) -> tuple[int, dict[str, object]] | None:
    """(bytes the header takes, its entries in the order of the file), as far as it can be read at all."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 0 < length <= min(_MOST_HEADER_BYTES, size - 8):
        return None
    room = memoryview(bytearray(length))
    if _read_into(descriptor, room, 8) != length:
        return None
    try:
        header = json.loads(bytes(room))
    except (ValueError, RecursionError):
        return None
    return (8 + length, header) if isinstance(header, dict) else None


def _name_at(header: tuple[int, dict[str, object]] | None, at: int) -> str | None:
    """The tensor at a position in the file, by a header that may be damaged itself."""
    if header is None or at < header[0]:
        return "header"
    for name, entry in header[1].items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if _are_counts(offsets) and len(offsets) == 2 and offsets[0] <= at - header[0] < offsets[1]:
            return name
    return None


def _described(folder: str, name: str, entry: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if isinstance(entry, dict):
        dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if dtype in ITEM_BYTES and _are_counts(shape) and _are_counts(span) and len(span) == 2:
            count = 1
            for side in shape:
                count *= side
            if span[1] - span[0] == count * ITEM_BYTES[dtype]:
                return dtype, tuple(shape), (span[0], span[1])
    raise DamagedCheckpoint(folder, STATE, "is described wrongly", name)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _expect_size(folder: str, name: str, size: int, fields: dict[str, object]) -> None:
    if size != size_of(fields, name):
        raise DamagedCheckpoint(folder, name, f"{size} of {size_of(fields, name)} bytes are there")


def _size_words(size: int, fields: dict[str, object]) -> str:
    return f"{size} of {size_of(fields, STATE)} bytes are there"


def _open_folder(folder: str) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedCheckpoint(folder, ".", _refusal(error)) from None


def _open_plain(folder: str, where: int, name: str) -> tuple[int, int]:
    """A regular file of this folder, no link, nothing that could block: descriptor and size."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=where)
    except OSError as error:
        raise DamagedCheckpoint(folder, name, _refusal(error)) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(folder, name, "it is not a plain file")
    return descriptor, found.st_size


def _refusal(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return "it is a link, which is not followed"
    return "it is not there" if error.errno == errno.ENOENT else str(error.strerror)


def _read(descriptor: int, size: int) -> bytes:
    room = bytearray(size)
    return bytes(room[: _read_into(descriptor, memoryview(room), 0)])


def _read_into(descriptor: int, room: memoryview, at: int) -> int:
    done = 0
    while done < len(room):
        count = os.preadv(descriptor, [room[done:]], at + done)
        if not count:
            break
        done += count
    return done


def _no_tensor(name: str) -> object:
    raise BadTree(f"a tensor {name!r} where none can be")
