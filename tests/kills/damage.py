"""Bits flipped and files cut short: damage is noticed wherever it is."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from buoy.checkpoint.store import DamagedCheckpoint, Entry, Store
from tests.checkpoint.ground import contents, save
from tests.kills.kind import Tally

_SIZE = 400


def flipped_bits(number: int, chance: random.Random, folder: Path) -> Tally:
    """Single bits anywhere in the three files; 10,000 of them in a campaign."""
    tally = Tally()
    store, entry = _checkpoint(folder / "run")
    places = [
        (path, bit) for path in sorted(Path(entry.folder).iterdir()) for bit in range(8 * path.stat().st_size)
    ]
    wanted = min(len(places), max(10_000, 10 * number) if number >= 50 else 40 * number)
    for path, bit in chance.sample(places, wanted):
        descriptor = os.open(path, os.O_RDWR)
        good = os.pread(descriptor, 1, bit // 8)
        os.pwrite(descriptor, bytes([good[0] ^ 1 << bit % 8]), bit // 8)
        _expect_complaint(tally, store, entry, path.name, f"bit {bit} of {path.name}")
        os.pwrite(descriptor, good, bit // 8)
        os.close(descriptor)
    return tally


def cut_short(number: int, chance: random.Random, folder: Path) -> Tally:
    """Each file ends at any of its bytes."""
    tally = Tally()
    store, entry = _checkpoint(folder / "run")
    for path in sorted(Path(entry.folder).iterdir()):
        good = path.read_bytes()
        lengths = range(len(good)) if number >= 50 else chance.sample(range(len(good)), 10 * number)
        for length in sorted(lengths, reverse=True):
            os.truncate(path, length)
            _expect_complaint(tally, store, entry, path.name, f"{path.name} of {length} bytes")
        path.write_bytes(good)
    return tally


def _checkpoint(run: Path) -> tuple[Store, Entry]:
    shutil.rmtree(run, ignore_errors=True)
    save(run, 1, size=_SIZE)
    store = Store(run)
    return store, store.list()[0]


def _expect_complaint(tally: Tally, store: Store, entry: Entry, name: str, words: str) -> None:
    tally.tried += 1
    try:
        contents(store.open(entry))
        tally.fail("unequal", f"{words} was not noticed")
    except DamagedCheckpoint as error:
        if error.file != name:
            tally.fail("unequal", f"{words} was noticed in {error.file}")
