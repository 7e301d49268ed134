"""What a checkpoint consists of: `manifest.json`, and where each tensor goes in `state.safetensors`.

The manifest has the checksum of every byte and of itself; it is the last file written and the first one read. The other
is a valid safetensors file that direct I/O and mmap like: the format allows no holes, so alignment comes from order
(wide types first) and a header that is padded with spaces to a page. The writer process imports this file, so it
stays with the cheap parts of the standard library.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from buoy.checkpoint.encoding import ITEM_BYTES, Tensor
from buoy.errors import BuoyError

FAMILY = "buoy.checkpoint/"
SCHEMA = FAMILY + "1"
MANIFEST = "manifest.json"
STATE = "state.safetensors"
VALUES = "values.json"
MOST_MANIFEST_BYTES = 16 << 20
"""Of a checkpoint of some terabytes."""
PIECE_BYTES = 8 << 20
"""The most bytes under one checksum."""
MOST = 10**18
"""No step and no size is larger."""

_LATEST = 4e9
"""The year 2096."""
_SEAL = ',\n "crc32": "%08x"\n}\n'
_SEAL_BYTES = len(_SEAL % 0)


class DamagedCheckpoint(BuoyError):  # noqa: N818 - says what happened
    """A checkpoint is not what was written: cut short, changed, or not whole."""

    def __init__(self, folder: str, file: str, what: str, tensor: str | None = None) -> None:
        """`tensor`: the first tensor (or field of the manifest) that is not as it was written."""
        where = f"{file}: {what}" if tensor is None else f"{file}: {what} (tensor {tensor!r})"
        super().__init__(
            f"damaged checkpoint {folder}",
            received=where,
            expected="every byte as it was saved",
            hint="`buoy ckpt list` shows the others; the run resumes from the newest good one",
        )
        self.folder, self.file, self.what, self.tensor = folder, file, what, tensor


class NewerCheckpoint(BuoyError):  # noqa: N818 - says what happened
    """A checkpoint of a format that this version of buoy does not know."""


def seal(fields: dict[str, object]) -> bytes:
    """The manifest as a file; its last line is the checksum of all that stands before it."""
    body = json.dumps(fields, indent=1, allow_nan=False).encode()[:-2]  # without the closing brace
    return body + (_SEAL % zlib.crc32(body)).encode()


def unseal(data: bytes, folder: str) -> dict[str, object]:
    """The fields of a manifest; `DamagedCheckpoint` if a single bit of it is not as written."""
    body, seal_line = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal_line != (_SEAL % zlib.crc32(body)).encode():
        raise DamagedCheckpoint(folder, MANIFEST, "its checksum does not match" if data else "it is empty")
    try:
        fields = loads(data)
    except ValueError as error:
        raise DamagedCheckpoint(folder, MANIFEST, f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise DamagedCheckpoint(folder, MANIFEST, "not a JSON object")
    schema = fields.get("schema")
    if schema != SCHEMA:
        if isinstance(schema, str) and schema.startswith(FAMILY):
            raise NewerCheckpoint(
                f"checkpoint {folder} has a format that this version of buoy cannot read",
                received=schema[:80],
                expected=SCHEMA,
                hint="a newer buoy wrote it: upgrade buoy",
            )
        raise DamagedCheckpoint(folder, MANIFEST, "not a buoy checkpoint", "schema")
    _check_fields(fields, folder)
    return fields


def loads(data: bytes) -> object:
    """JSON as checkpoints have it; ValueError for what is none, such as NaN, or lists in lists without end."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is not a valid number")


def saved_at(about: dict[str, object]) -> float | None:
    """When it was saved, in seconds since 1970; None where no clock can have said so."""
    time = about.get("time")
    is_time = isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time < _LATEST
    return float(time) if is_time else None  # type: ignore[arg-type]


def pieces_of(fields: dict[str, object], file: str) -> list[tuple[int, int]]:
    """(length, checksum) of a file's pieces, in order; of a manifest that `unseal` gave."""
    return [(length, crc) for length, crc in fields["files"][file]["pieces"]]  # type: ignore[index]


def size_of(fields: dict[str, object], file: str) -> int:
    """A file's size in bytes by the manifest."""
    return int(fields["files"][file]["size"])  # type: ignore[index]


def _check_fields(fields: dict[str, object], folder: str) -> None:
    if not _is_count(fields.get("step")):
        raise DamagedCheckpoint(folder, MANIFEST, "no step number", "step")
    if not isinstance(fields.get("about"), dict):
        raise DamagedCheckpoint(folder, MANIFEST, "its description is missing", "about")
    files = fields.get("files")
    # Exactly these names: a manifest can then never lead to a path of its own making.
    if not isinstance(files, dict) or set(files) != {STATE, VALUES}:
        raise DamagedCheckpoint(folder, MANIFEST, f"its files must be {STATE} and {VALUES}", "files")
    for name, file in files.items():
        pieces = file.get("pieces") if isinstance(file, dict) else None
        if not isinstance(pieces, list) or not all(_is_piece(piece) for piece in pieces):
            raise DamagedCheckpoint(folder, MANIFEST, f"the checksums of {name} are missing", "files")
        if file.get("size") != sum(length for length, _ in pieces):
            raise DamagedCheckpoint(
                folder, MANIFEST, f"the pieces of {name} do not add up to its size", "files"
            )


def _is_piece(piece: object) -> bool:
    return (
        isinstance(piece, list)
        and len(piece) == 2
        and all(_is_count(number) for number in piece)
        and 0 < piece[0] <= PIECE_BYTES
    )


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < MOST


PAGE = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """One file's plan; it stays the same while names, types and shapes do."""

    signature: tuple[tuple[str, str, tuple[int, ...]], ...]
    header: bytes
    """The file's beginning: length, JSON, padding."""
    places: dict[str, tuple[int, int]]
    """name -> first byte and end in the file, in the order of the file."""
    size: int

    @property
    def ends(self) -> list[int]:
        """Where the header and each tensor end: checksums are cut there, so that damage has a name."""
        return [len(self.header), *(end for _, end in self.places.values())]


def signature_of(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """What a layout depends on."""
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def lay_out(tensors: Mapping[str, Tensor]) -> Layout:
    """The plan for these tensors.

    >>> lay_out({"w": Tensor("F32", (3,), print)}).places
    {'w': (4096, 4108)}
    """
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])  # stable: else as given
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name in order:
        spans[name] = (at, at + tensors[name].nbytes)
        at += tensors[name].nbytes
    described = {
        name: {"dtype": tensors[name].dtype, "shape": list(tensors[name].shape), "data_offsets": list(span)}
        for name, span in spans.items()
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // PAGE) * PAGE - 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: (len(header) + start, len(header) + end) for name, (start, end) in spans.items()}
    return Layout(signature_of(tensors), header, places, len(header) + at)
