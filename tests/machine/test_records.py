"""Files that are no files, have no end, or say what no reader expects."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.machine.files import (
    MOST_JSON,
    open_regular,
    parse_json,
    read_bounded,
    read_end,
    read_json,
    read_lines,
)


def _bind(path: Path) -> None:
    os.chdir(path.parent)
    socket.socket(socket.AF_UNIX).bind(path.name)


ODD: dict[str, Callable[[Path], object]] = {
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a socket": _bind,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a dead link": lambda path: path.symlink_to("nowhere"),
    "a link to somebody's file": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_only_regular_files_are_opened_and_nobody_waits(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "events.jsonl"
    make(path)

    with pytest.raises(OSError):
        open_regular(str(path))
    assert read_json(str(path)) is None
    assert list(read_lines(str(path))) == []


def test_a_link_is_followed_where_that_is_meant_and_a_device_is_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1")
    (tmp_path / "link.py").symlink_to("train.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")

    assert read_bounded(str(tmp_path / "link.py"), 100, follow=True) == b"x = 1"
    with pytest.raises(OSError, match="not a plain file"):
        read_bounded(str(tmp_path / "zero.py"), 100, follow=True)


def test_a_name_that_no_file_can_have_is_an_os_error() -> None:
    for name in ("a\0b", "\ud800", "x" * 5000):
        with pytest.raises(OSError):
            open_regular(name)


def test_no_more_is_read_than_there_is_room_for(tmp_path: Path) -> None:
    path = tmp_path / "samples-0001.jsonl"
    path.write_bytes(b"[1,2]\n" + b"[" + b"[]," * (15 << 20) + b"[]]\n" + b"[3,4]\n")

    tracemalloc.start()
    whole = list(read_lines(str(path), 64 << 20))
    last = list(read_lines(str(path), 100, last=True))
    nothing = read_json(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert whole == [[1, 2], [3, 4]] and last == [[3, 4]] and nothing is None
    assert peak < 150 << 20  # as a JSON value, that line alone takes a gigabyte
    assert len(read_bounded(str(path), 10)) == len(read_end(str(path), 10)[0]) == 10
    assert read_bounded(str(path), 3, at=1) == b"1,2"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[NaN, Infinity, -Infinity, 1e999, 1e18, 1e17]", [None, None, None, None, None, 1e17]),
        ("[1000000000000000000000000000000, -1000000000000000000, 42]", [None, None, 42]),
        (
            r'["\ud800x", "caf\udce9", "\u0000", "\ud83d\ude00"]',
            ["\ufffdx", "caf\udce9", "\ufffd", "\U0001f600"],
        ),
        (r'{"\ud800": true}', {"\ufffd": True}),
        ('{"NaN": "Infinity", "1e999": 1}', {"NaN": "Infinity", "1e999": 1}),
        ("[" * 30 + "1" + "]" * 30, eval("[" * 30 + "1" + "]" * 30)),
    ],
)
def test_what_json_says_can_be_used_as_it_is(text: str, value: object) -> None:
    assert parse_json(text.encode()) == value


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "9" * 5000, '"\xff"', "1" * (MOST_JSON + 1)], ids=lambda text: text[:4]
)
def test_what_is_no_json_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text.encode("latin-1"))


def test_depth_ends(tmp_path: Path) -> None:
    value, depth = parse_json(b"[" * 500 + b"]" * 500), 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1

    assert value is None and depth < 50
