"""Reading a checkpoint: every byte is verified before anything is handed out, and again as it is.

Nothing of what is read is trusted: sizes are bounded, only plain files of the checkpoint's own folder are
opened, and links are not followed. Nothing is mapped: a file that somebody else changes (a drive's client that syncs)
would change under whoever looks at it, and one that is cut short would kill that process.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard

from buoy.checkpoint.encoding import ITEM_BYTES, BadTree, decode
from buoy.checkpoint.manifest import (
    MANIFEST,
    MOST,
    MOST_MANIFEST_BYTES,
    PIECE_BYTES,
    STATE,
    VALUES,
    DamagedCheckpoint,
    loads,
    pieces_of,
    size_of,
    unseal,
)
from buoy.machine import files

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
    nbytes: int
    read_into: Callable[[memoryview], None]
    """Fill memory of this size with its bytes, in C order; `DamagedCheckpoint` if they are no longer as written."""
    order: tuple[int, ...] | None = None
    """How its dimensions lay in the training's memory, the outermost first; None: in C order too."""

    def read(self) -> memoryview:
        """Its bytes, in memory of their own."""
        room = memoryview(bytearray(self.nbytes))
        self.read_into(room)
        return room


NOT_AS_WRITTEN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What comes of values that fit their checksums, and are not what anybody expects there."""


class Checkpoint:
    """A checkpoint whose every byte was as written when it was opened."""

    def __init__(self, folder: str, fields: dict[str, object], values: object, state: _State) -> None:
        about = decode_about(fields)
        if about is None:
            raise DamagedCheckpoint(folder, MANIFEST, "its description is missing", "about")
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
                lambda stored: self._state.stored(stored).read(),
            )
        except (BadTree, *NOT_AS_WRITTEN) as error:
            raise DamagedCheckpoint(self.folder, VALUES, f"{name!r} cannot be read: {error}") from None

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """What is done within takes what is saved here for what buoy writes; where it is not, that is said."""
        try:
            yield
        except NOT_AS_WRITTEN as error:
            words = f"{what} is not in the form that buoy writes ({type(error).__name__}: {error})"
            raise DamagedCheckpoint(self.folder, VALUES, words) from error

    def __repr__(self) -> str:
        return f"<checkpoint of step {self.step} in {self.folder}>"


class _State:
    """`state.safetensors`, open."""

    def __init__(
        self,
        folder: str,
        descriptor: int,
        pieces: list[tuple[int, int]],
        size: int,
        header: dict[str, object],
    ) -> None:
        """`size`: of the header. The descriptor is closed with this object."""
        self._folder = folder
        self._descriptor = descriptor
        self.places: dict[str, tuple[str, tuple[int, ...], _Block]] = {}
        coming, at = iter(pieces), 0
        while at < size:
            at += next(coming, (size + 1, 0))[0]
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, end) = _described(folder, name, entry)
            block = _Block(size + start, 0, [])
            while at == block.start + block.size and block.size < end - start:
                block.pieces.append(next(coming, (end + 1, 0)))
                block.size += block.pieces[-1][0]
                at += block.pieces[-1][0]
            # Each begins a piece of its own: so each can be verified by itself.
            if block.size != end - start:
                raise DamagedCheckpoint(
                    folder, STATE, "the tensor's offsets do not match its checksums", name
                )
            self.places[name] = (dtype, shape, block)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def stored(self, name: str, order: object = None) -> StoredTensor:
        """A tensor, to be read."""
        if name not in self.places:
            raise DamagedCheckpoint(self._folder, STATE, "a tensor of the saved values is missing", name)
        dtype, shape, block = self.places[name]

        def read_into(room: memoryview) -> None:
            if _first_bad(self._descriptor, block, room, filled=True) is not None:
                raise DamagedCheckpoint(self._folder, STATE, "it changed while it was being loaded", name)

        if order is None:
            return StoredTensor(name, dtype, shape, block.size, read_into)
        places = [place for place in order if type(place) is int] if isinstance(order, list) else []
        if places != order or sorted(places) != [*range(len(shape))]:
            raise BadTree(f"{name!r} has a memory order that does not match its dimensions")
        return StoredTensor(name, dtype, shape, block.size, read_into, tuple(places))


def read_manifest(folder: str) -> tuple[dict[str, object], int]:
    """A checkpoint's manifest, verified by itself, and its size in bytes."""
    where = _open_folder(folder)
    try:
        descriptor, size = _open_plain(folder, where, MANIFEST)
        try:
            if size > MOST_MANIFEST_BYTES:
                raise DamagedCheckpoint(folder, MANIFEST, f"{size} bytes are too many for a manifest")
            return unseal(_read(descriptor, size), folder), size
        finally:
            os.close(descriptor)
    finally:
        files.close_folder(where)


def decode_about(fields: dict[str, object]) -> dict[str, object] | None:
    """What a manifest says about its checkpoint; None when that cannot be read."""
    try:
        about = decode(fields["about"], _no_tensor)
    except (BadTree, RecursionError):
        return None
    return {str(key): _plain(value) for key, value in about.items()} if isinstance(about, dict) else None


def _plain(value: object, depth: int = 4) -> object:
    """Figures and words, and lists and dicts of them: what a training says about a checkpoint; None for all else."""
    if isinstance(value, dict) and depth:
        return {str(key): _plain(item, depth - 1) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple) and depth:
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, str | bool | float):
        return value
    return value if isinstance(value, int) and -MOST < value < MOST else None


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

    `progress` receives how many bytes have been verified since its last call.
    """
    fields, _ = read_manifest(folder)
    where = _open_folder(folder)
    try:
        values = _read_values(folder, where, fields)
        state = _open_state(folder, where, fields, progress)
    finally:
        files.close_folder(where)
    return Checkpoint(folder, fields, values, state)


def _read_values(folder: str, where: files.Folder, fields: dict[str, object]) -> object:
    descriptor, size = _open_plain(folder, where, VALUES)
    try:
        _expect_size(folder, VALUES, size, fields)
        if size > _MOST_VALUES_BYTES:
            raise DamagedCheckpoint(folder, VALUES, f"{size} bytes are too many for this file")
        data = _read(descriptor, size)
    finally:
        os.close(descriptor)
    at = 0
    for length, crc in pieces_of(fields, VALUES):
        if zlib.crc32(data[at : at + length]) != crc:
            raise DamagedCheckpoint(folder, VALUES, "its checksum does not match")
        at += length
    try:
        return loads(data)
    except ValueError as error:
        raise DamagedCheckpoint(folder, VALUES, f"not JSON: {error}") from None


def _open_state(
    folder: str, where: files.Folder, fields: dict[str, object], progress: Callable[[int], object] | None
) -> _State:
    descriptor, size = _open_plain(folder, where, STATE)
    try:
        pieces = pieces_of(fields, STATE)
        bad = _verify(descriptor, pieces, progress)
        header = _read_header(descriptor, size)
        if size != size_of(fields, STATE) or bad is not None:
            at = size if bad is None else bad
            what = (
                "its checksum does not match" if size == size_of(fields, STATE) else _size_words(size, fields)
            )
            raise DamagedCheckpoint(folder, STATE, what, _name_at(header, at))
        if header is None:
            raise DamagedCheckpoint(folder, STATE, "no safetensors header", "header")
        return _State(folder, os.dup(descriptor), pieces, *header)
    finally:
        os.close(descriptor)


def _verify(
    descriptor: int, pieces: list[tuple[int, int]], progress: Callable[[int], object] | None
) -> int | None:
    """The position of the first piece that is not as written; None when all are."""
    blocks = _blocks(pieces)
    numbers = iter(range(len(blocks)))  # whoever is free takes the next

    def check() -> int | None:
        room = memoryview(bytearray(_BITE))
        for number in numbers:
            # Asked for in time, a cold disk delivers twice as fast as the kernel's own guess makes it.
            for coming in blocks[number + (_AHEAD if number else 1) : number + _AHEAD + 1]:
                files.read_ahead(descriptor, coming.start, coming.size)
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


def _first_bad(descriptor: int, block: _Block, room: memoryview, *, filled: bool = False) -> int | None:
    """The position of the first piece that is not as written.

    `filled`: the room is as large as the block, and has its bytes in the end; else it is used again and again.
    """
    at = block.start
    for length, crc in block.pieces:
        found, done = 0, 0
        while done < length:
            size = min(_BITE, length - done)
            to = at + done - block.start if filled else 0
            bite = room[to : to + size]
            if _read_into(descriptor, bite, at + done) != size:
                return at
            found = zlib.crc32(bite, found)
            done += size
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
    length = int.from_bytes(files.read_at(descriptor, 8, 0), "little")
    if size < 8 or not 0 < length <= min(_MOST_HEADER_BYTES, size - 8):
        return None
    room = memoryview(bytearray(length))
    if _read_into(descriptor, room, 8) != length:
        return None
    try:
        header = loads(bytes(room))
    except ValueError:
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
        known = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
        if known is not None and _are_counts(shape) and _are_counts(span) and len(span) == 2:
            count = 1
            for side in shape:
                count *= side
            if span[1] - span[0] == count * known:
                return str(dtype), tuple(shape), (span[0], span[1])
    raise DamagedCheckpoint(folder, STATE, "invalid entry in the header", name)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _expect_size(folder: str, name: str, size: int, fields: dict[str, object]) -> None:
    if size != size_of(fields, name):
        raise DamagedCheckpoint(folder, name, f"it has {size} bytes, expected {size_of(fields, name)}")


def _size_words(size: int, fields: dict[str, object]) -> str:
    return f"it has {size} bytes, expected {size_of(fields, STATE)}"


def _open_folder(folder: str) -> files.Folder:
    try:
        return files.open_folder(folder)
    except OSError as error:
        raise DamagedCheckpoint(folder, ".", _refusal(error)) from None


def _open_plain(folder: str, where: files.Folder, name: str) -> tuple[int, int]:
    """A regular file of this folder, no link, nothing that could block: descriptor and size."""
    try:
        descriptor = files.open_regular(name, folder=where)
    except OSError as error:
        raise DamagedCheckpoint(folder, name, _refusal(error)) from None
    return descriptor, os.fstat(descriptor).st_size


def _refusal(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return "it is a symlink, which buoy does not follow"
    return "it is missing" if error.errno == errno.ENOENT else str(error.strerror)


def _read(descriptor: int, size: int) -> bytes:
    room = bytearray(size)
    return bytes(room[: _read_into(descriptor, memoryview(room), 0)])


def _read_into(descriptor: int, room: memoryview, at: int) -> int:
    done = 0
    while done < len(room):
        count = files.read_into(descriptor, room[done:], at + done)
        if not count:
            break
        done += count
    return done


def _no_tensor(name: str, order: object = None) -> object:
    raise BadTree(f"a tensor, {name!r}, where none is allowed")
