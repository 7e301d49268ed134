"""What the store's tests share: arrays without a framework, a small state, and trainers to be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buoy.checkpoint.encoding import Tensor
from buoy.checkpoint.manifest import MANIFEST, VALUES, seal
from buoy.checkpoint.reader import StoredTensor
from buoy.checkpoint.saver import Receipt, Saver
from buoy.checkpoint.store import Checkpoint, Store

ROOT = Path(__file__).parents[2]


class Array:
    """Bytes with a type and a shape: all that the store needs of a framework."""

    def __init__(self, data: bytes, dtype: str = "U8", shape: tuple[int, ...] | None = None) -> None:
        self.data = bytearray(data)
        self.dtype = dtype
        self.shape = (len(data),) if shape is None else shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and vars(self) == vars(other)


def as_tensor(value: object) -> Tensor | None:
    if not isinstance(value, Array):
        return None

    def copy_into(room: memoryview) -> None:
        room[:] = value.data

    return Tensor(value.dtype, value.shape, copy_into, id(value))


def from_stored(stored: StoredTensor) -> Array:
    return Array(bytes(stored.read()), stored.dtype, stored.shape)


def forge(folder: Path, values: Any = None, **fields: object) -> None:
    """Change what a checkpoint says, and its checksums with it: every byte fits."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["crc32"]
    if values is not None:
        data = json.dumps(values).encode()
        (folder / VALUES).write_bytes(data)
        manifest["files"][VALUES] = {"size": len(data), "pieces": [[len(data), zlib.crc32(data)]]}
    (folder / MANIFEST).write_bytes(seal({**manifest, **fields}))


def pattern(size: int, seed: int) -> bytes:
    """Bytes that tell their place and their save apart from any other."""
    block = b"".join(
        ((seed * 2654435761 + at * 40503) & 0xFFFFFFFF).to_bytes(4, "little") for at in range(1024)
    )
    return (block * (size // 4096 + 1))[:size]


def state(seed: int, size: int = 40_000) -> dict[str, object]:
    """A state that depends on the seed in every part of it."""
    return {
        "model": {
            "embed.weight": Array(pattern(size, seed), "F32", (size // 4,)),
            "bias": Array(pattern(301, seed + 1), "I8"),
            "empty": Array(b"", "F64", (0, 3)),
            "scale": Array(pattern(4, seed + 2), "F32", ()),
        },
        "optimizer": {"state": {0: {"step": seed, "m": Array(pattern(size // 2, seed + 3), "BF16", (size // 4,))}}},
        "rng": {"python": (3, (seed, 2, 3), None), "blob": pattern(3000, seed)},
        "step": seed,
    }  # fmt: skip


def about(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "epoch": 0, "reason": "user", "metrics": {}, "pin": None, "finished": False,
            "time": time.time(), **more}  # fmt: skip


def open_saver(folder: Path | str, heard: list[str] | None = None) -> Saver:
    said: list[str] = [] if heard is None else heard
    return Store(folder).saver(said.append, lambda kind, **values: None)


def save(folder: Path | str, *steps: int, **more: Any) -> Receipt:
    """Save `state(step)` for each step, wait, close; the last one's receipt."""
    saver = open_saver(folder)
    for step in steps:
        receipt = saver.save(state(step, **more), about(step), as_tensor, wait=True)
        assert receipt.error is None, receipt
    saver.close()
    return receipt


def contents(checkpoint: Checkpoint) -> dict[str, object]:
    return {name: checkpoint.value(name, from_stored) for name in checkpoint.names}


def trainer(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process that runs this code with everything of this module in scope."""
    program = f"from tests.checkpoint.ground import *\nimport sys, signal\n{code}"
    options.setdefault("stdout", subprocess.PIPE)
    options["env"] = {**options.get("env", os.environ), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], text=True, cwd=ROOT, **options)


def writers(folder: Path | str, find: Callable[[str], bool] = lambda line: "writer.py" in line) -> list[int]:
    """Writer processes that hold this run's lock file open."""
    lock = os.path.realpath(os.path.join(folder, "checkpoints", "lock"))
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            if find(command) and lock in [
                os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")
            ]:
                found.append(int(name))
        except OSError:
            continue
    return found
