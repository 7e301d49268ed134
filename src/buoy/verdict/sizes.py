"""How many bytes an allocation asked for, from the texts in which libraries say so."""

from __future__ import annotations

from buoy.errors import BuoyError
from buoy.text import whole_number
from buoy.units import parse_bytes

_WIDTHS = {
    "bool": 1, "int8": 1, "uint8": 1, "half": 2, "bfloat16": 2, "float16": 2, "int16": 2, "float": 4, "float32": 4,
    "int32": 4, "double": 8, "float64": 8, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_UNITS = ("bytes", "B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_asked_for(message: str) -> int | None:
    """The size of the allocation a message speaks of; None when it names none.

    >>> bytes_asked_for("Unable to allocate 745. GiB for an array with shape (100000, 1000, 1000)")
    799937658880
    >>> bytes_asked_for("OOM when allocating tensor with shape[10,20] and type float on /job:localhost")
    800
    """
    for marker in ("tried to allocate ", "Tried to allocate ", "Unable to allocate "):
        _, found, rest = message.partition(marker)
        if found:
            return _amount(rest)
    _, found, rest = message.partition("tensor with shape[")
    return _tensor(rest) if found else None


def _amount(rest: str) -> int | None:
    words = rest.split(" ", 2)
    unit = words[1].rstrip(".,;:\n") if len(words) > 1 else ""
    if unit not in _UNITS:
        return None
    try:
        return parse_bytes(words[0] + ("" if unit == "bytes" else unit))
    except BuoyError:
        return None


def _tensor(rest: str) -> int | None:
    shape, closed, after = rest.partition("]")
    kind = after.removeprefix(" and type ").split(" ", 1)[0]
    width = _WIDTHS.get(kind)
    sides = [whole_number(side.strip()) for side in shape.split(",")] if shape else []
    if not closed or width is None:
        return None
    for side in sides:
        if side is None:
            return None
        width *= side
    return width if width < 1 << 62 else None
