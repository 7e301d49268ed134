"""JSON files of a run folder, written whole, and read whatever has happened to them: a torn disk, a stranger's folder.

What JSON says is handed out only as far as a reader can use it, so that nobody behind has to think of NaN, of 10**400,
of half a character or of a list in a list in a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from buoy.machine.files import read_bounded, read_end, write_whole

MOST_JSON = 1 << 20
"""Bytes of one JSON text: Python needs up to thirty times as many."""
MOST_LINES = 5 << 20
"""Bytes of a file of lines; the recorder ends its own at four fifths of that."""
_DEEPEST = 40
_LARGEST = 1e18
"""No time, count or number of bytes that a machine tells is larger; `float` and `time` can handle what is smaller."""

# What of a text might not be as a reader expects it: everything else is spared a second look.
_ODD_JSON = re.compile(r"NaN|Infinity|[0-9]{18}|[eE]\+?[0-9]{2}|\\u(?:[dD][89a-fA-F]|0000)")
_ODD_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""A file name may hold the others: they stand for its bytes that are not UTF-8."""


def write_json(path: str, value: object) -> None:
    """The whole file or nothing."""
    write_whole(path, json.dumps(value).encode())


def read_json(path: str) -> dict | None:  # type: ignore[type-arg]
    """A JSON object, or None when it is missing, torn, too large or something else."""
    try:
        value = parse_json(read_bounded(path, MOST_JSON + 1))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: str, most: int = MOST_LINES, *, last: bool = False) -> Iterator[dict | list]:  # type: ignore[type-arg]
    """Each line that is a JSON object or list, of the first (or `last`) bytes; what is torn or foreign is left out."""
    try:
        data = read_end(path, most)[0] if last else read_bounded(path, most)
    except OSError:
        return
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        try:
            value = parse_json(data[at:end]) if end - at <= MOST_JSON else None
        except ValueError:
            value = None
        if isinstance(value, dict | list):
            yield value
        at = end + 1


def parse_json(data: bytes) -> object:
    """What a JSON text says, ValueError if it is none; numbers, texts and depths that no reader expects become None.

    >>> parse_json(b'{"t": 1.5, "rss": NaN, "step": 1e999, "name": "cat\\\\ud800"}')
    {'t': 1.5, 'rss': None, 'step': None, 'name': 'cat\ufffd'}
    """
    if len(data) > MOST_JSON:
        raise ValueError(f"more than {MOST_JSON} bytes")
    text = data.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    is_plain = text.count("[") + text.count("{") <= _DEEPEST and not _ODD_JSON.search(text)
    return value if is_plain else _usable(value, _DEEPEST)


def _usable(value: object, depth: int) -> object:
    if isinstance(value, str):
        return _ODD_TEXT.sub("\ufffd", value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if -_LARGEST < value < _LARGEST else None  # NaN is neither
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {str(_usable(key, 0)): _usable(item, depth - 1) for key, item in value.items()}
    assert isinstance(value, list)
    return [_usable(item, depth - 1) for item in value]
