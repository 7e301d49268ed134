"""Ways to damage a file: bits, lengths, JSON of the wrong kind, and things that are no file at all."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from buoy.checkpoint.manifest import MANIFEST, PIECE_BYTES, STATE, VALUES

ESCAPE = "\x1b]0;PWNED\x07\x1b[31m"
COMMAND = "\n::error::PWNED\n"
LONG_LINE = 45 << 20
HUGE_FILE = 4 << 30

# What a number, a text or a list may have become; what is `raw` is written as it stands.
_RAW = (
    "<raw NaN>", "<raw Infinity>", "<raw -Infinity>", "<raw 1e999>", "<raw 1" + "0" * 400 + ">",
    "<raw -1" + "0" * 30 + ">", "<raw 1e300>",
    "<raw 1" + "0" * 30 + ">", "<raw -1e17>", "<raw 99999999999999999>", "<raw " + "9" * 5000 + ">",
    '<raw "\\ud800">', '<raw "\\udcff/\\udfff">', '<raw "\\u0000">', "<raw " + "[" * 60 + "]" * 60 + ">",
    "<raw " + "[" * 900 + "]" * 900 + ">", "<raw " + "[" * 100_000 + "]" * 100_000 + ">",
    "<raw " + '{"a":' * 500 + "1" + "}" * 500 + ">", "<raw " + '{"cause":' * 60 + "{}" + "}" * 60 + ">",
)  # fmt: skip
_PLAIN: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.0, -1.5, 2**31, 2**63, -(2**63), 4e9, 1e17, "", " ", "x", "1", "-", "/", "..",
    "../../..", "/dev/zero", "/proc/self/mem", "x" * 300, "y" * 200_000, ESCAPE, COMMAND, f"a{ESCAPE}b{COMMAND}c",
    "\u202e\u2066rtl", "\x9b31m", "²", "a/b\0c", [], {}, [[]], [{}], {"": None}, {"id": []}, ["a", 1, None, {}, []],
    [1, 2], [1, 2, 3], [None] * 3, {"kind": "exception"}, [0] * 20_000, {"$": "tuple", "v": 3}, {"$": "array"},
    {"$": "tensor", "v": "model/0.weight"}, {"$": "dict", "v": [[[], 1]]}, {"$": []}, {"$": "float", "v": "zz"},
    {"$": "enum", "named": ["os", "environ", "x"]}, {"$": "scalar", "dtype": "int8", "v": 1000},
)  # fmt: skip


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """A few bits or bytes of it are not as they were."""
    if not data:
        return chance.randbytes(chance.choice((1, 50, 5000)))
    kind = chance.randrange(7)
    room = bytearray(data)
    at, end = sorted((chance.randrange(len(room)), chance.randrange(len(room))))
    if kind == 0:
        for _ in range(chance.choice((1, 1, 2, 8, 64))):
            room[chance.randrange(len(room))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del room[at:]
    elif kind == 2:
        room[at:end] = bytes(end - at)
    elif kind == 3:
        room[at:at] = chance.randbytes(chance.choice((1, 20, 4096)))
    elif kind == 4:
        room[at:at] = room[at:end] * chance.choice((1, 3, 50))
    elif kind == 5:
        del room[at:end]
    else:
        room[:] = chance.choice(
            (b"", b"\n", b"{}", b"[]", b"null", b"\xff\xfe", b"0", b'"', chance.randbytes(300))
        )
    return bytes(room)


def mutate_json(value: Any, chance: random.Random) -> str:
    """One or two places of a JSON value hold something else."""
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        value = _changed(value, chance)
    text = json.dumps(value)
    return re.sub(r'"<raw ((?:[^"\\]|\\.)*)>"', lambda found: json.loads(f'"{found[1]}"'), text)


def _changed(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.12:
        return chance.choice(_RAW) if chance.random() < 0.35 else chance.choice(_PLAIN)
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    key = chance.choice(list(items))
    how = chance.random()
    if how < 0.06:
        del items[key]
    elif how < 0.12:
        items[chance.choice(("kind", "t", ESCAPE, COMMAND, "²", "\ud800", 99))] = items[key]
    elif how < 0.16:
        other = chance.choice(list(items))
        items[key], items[other] = items[other], items[key]
    else:
        items[key] = _changed(items[key], chance)
    return (
        {str(name): item for name, item in items.items()} if isinstance(value, dict) else list(items.values())
    )


def mutate_lines(data: bytes, chance: random.Random) -> bytes:
    """Lines of JSON, some of them changed, swapped, doubled or gone."""
    lines = data.split(b"\n")
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        how = chance.random()
        if how < 0.75:
            try:
                lines[at] = mutate_json(json.loads(lines[at]), chance).encode("utf-8", "surrogatepass")
            except (ValueError, RecursionError):
                lines[at] = mutate_bytes(lines[at], chance)
        elif how < 0.85:
            lines[at : at + 1] = [lines[at]] * chance.choice((0, 2, 2000))
        else:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        lines = lines or [b""]
    return b"\n".join(lines)


def mutate_beacon(data: bytes, chance: random.Random) -> bytes:
    """The page of a process: its numbers, its cell, its note."""
    room = bytearray(data.ljust(4096, b"\0"))
    how = chance.randrange(4)
    if how == 0:
        return mutate_bytes(data, chance)
    if how == 1:
        at = chance.choice((64, 72, 80, 88, 96, 104, 112))
        odd = (struct.pack("<d", one) for one in (float("nan"), float("inf"), 1e300, -1.0))
        room[at : at + 8] = chance.choice([*odd, b"\xff" * 8, b"\xff" * 7 + b"\x7f"])
        return bytes(room)
    if how == 2:
        text = chance.choice((ESCAPE, COMMAND, "In [\u00b2]", "x" * 500)).encode()[:500]
        room[512 : 516 + len(text)] = struct.pack("<I", len(text)) + text
        return bytes(room)
    (length,) = struct.unpack_from("<I", room, 1024)
    try:
        note = json.loads(room[1028 : 1028 + length])
    except (ValueError, RecursionError):
        note = {
            "kind": "exception",
            "type": "builtins.ValueError",
            "message": "bad",
            "where": None,
            "chain": [],
        }
    text = mutate_json(note, chance).encode("utf-8", "surrogatepass")[:3068]
    room[1024 : 1028 + len(text)] = struct.pack("<I", len(text)) + text
    return bytes(room[:4096])


def replace_file(path: Path, chance: random.Random) -> str:
    """Put something else in its place; what it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = chance.choice(list(_REPLACEMENTS))
    _REPLACEMENTS[kind](path)
    return kind


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the whole path may be longer than a socket's name may be
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(HUGE_FILE)


def _one_line(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b"[" + b"[]," * (LONG_LINE // 3) + b"[]]\n")


def _many_lines(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b'{"fields": ["t", "wall", "step"]}\n' + b"[1,2,3]\n" * (LONG_LINE // 8))


def _many_events(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b'{"kind":"save","t":1,"step":1,"what":"buoy"}\n' * (LONG_LINE // 45))


_REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/urandom": lambda path: path.symlink_to("/dev/urandom"),
    "a link to /dev/stdin": lambda path: path.symlink_to("/dev/stdin"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a dead link": lambda path: path.symlink_to("nowhere"),
    "a link to another file": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": lambda path: os.mkfifo(path),
    "a second pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a socket": _socket,
    "4 GiB of nothing": _sparse,
    "one line of 45 MB": _one_line,
    "45 MB of lines": _many_lines,
    "45 MB of events": _many_events,
    "nothing": lambda path: None,
}


def add_odd_name(folder: Path, chance: random.Random) -> str:
    """Something beside the others whose name nobody expects."""
    names = (
        "²", "٣", "0001x", "9" * 40, "9" * 200, "0000", "00000001", "process-²", "process-" + "9" * 30, "process-0",
        "samples-²", "samples-\udcff.jsonl", "caf\udce9", f"a{ESCAPE}", "a\n::error::PWNED", "step-" + "9" * 30,
        "step-000000099", "step-²²²²²²²²²", "step-000000020.9", ".hidden", "step-000000050." + "9" * 200,
    )  # fmt: skip
    name = chance.choice(names)
    path = folder / name
    how = chance.choice(("folder", "file", "pipe", "copy", "link"))
    if path.exists() or path.is_symlink():
        return f"{name!a} was there"
    others = [other for other in folder.iterdir() if other.name != name]
    if how == "copy" and others:
        other = chance.choice(others)
        if other.is_dir() and not other.is_symlink():
            with suppress(shutil.Error):  # a pipe in it is not copied
                shutil.copytree(other, path, symlinks=True, ignore=shutil.ignore_patterns("lock"))
            return f"a copy of {other.name!a} as {name!a}"
    if how == "pipe":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to("/dev")
    elif how == "file":
        path.write_bytes(b"{}")
    else:
        path.mkdir()
    return f"{how} {name!a}"


def mutate_file(path: Path, chance: random.Random) -> str:
    """Change what a file holds, in a way that fits its kind; what was done."""
    data = path.read_bytes()
    name = path.name
    if name == "beacon" and chance.random() < 0.8:
        path.write_bytes(mutate_beacon(data, chance))
        return "beacon"
    if name.endswith((".jsonl", "cells")) and chance.random() < 0.8:
        path.write_bytes(mutate_lines(data, chance))
        return "lines"
    if name.endswith((".json", ".ipynb")) and chance.random() < 0.8:
        try:
            text = mutate_json(json.loads(data), chance)
        except (ValueError, RecursionError):
            text = chance.choice(("{}", "[]", "7"))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return "JSON"
    path.write_bytes(mutate_bytes(data, chance))
    return "bytes"


def forge(folder: Path, chance: random.Random) -> str:
    """Change a checkpoint and its checksums with it: what is in it is somebody else's, and every byte fits."""
    what = chance.choice(("step", "about", "fields", "values", "values", "values", "header", "header"))
    fields = json.loads((folder / MANIFEST).read_bytes())
    fields.pop("crc32", None)
    if what == "values":
        text = mutate_json(json.loads((folder / VALUES).read_bytes()), chance)
        (folder / VALUES).write_bytes(text.encode("utf-8", "surrogatepass"))
    elif what == "header":
        data = (folder / STATE).read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = mutate_json(json.loads(data[8 : 8 + length]), chance).encode("utf-8", "surrogatepass")
        (folder / STATE).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    for name in (STATE, VALUES) if what in ("values", "header") else ():
        data = (folder / name).read_bytes()
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        fields["files"][name] = {
            **fields["files"][name],
            "size": len(data),
            "pieces": [[len(piece), zlib.crc32(piece)] for piece in pieces],
        }
    if what in ("step", "about"):
        text = json.dumps({**fields, what: "@@"}).replace('"@@"', mutate_json(fields[what], chance))
    else:
        text = mutate_json(fields, chance) if what == "fields" else json.dumps(fields)
    body = text.encode("utf-8", "surrogatepass").removesuffix(b"}")
    (folder / MANIFEST).write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())
    return f"forged {what}"
