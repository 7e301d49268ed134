"""Power loss while an old checkpoint is removed: it is there whole or not listed, and no other one is touched."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

from buoy.checkpoint import store as store_room
from buoy.checkpoint.store import DamagedCheckpoint, Store
from buoy.machine import disk as real_disk
from buoy.machine import files
from tests.checkpoint.ground import save
from tests.kills.calls import SIZE, save_here
from tests.kills.kind import Tally, equal, go_on, must_bite
from tests.kills.power import Disk

_OLD, _STAYS, _NEW = 1, 2, 3


def power_loss_removal(number: int, chance: random.Random, folder: Path) -> Tally:
    """As retention does it: a new one is saved, then the oldest removed; cut off after any call of either."""
    tally = Tally()
    for emptied in (False, True):
        before, disk, saved = _record(folder / f"emptied-{emptied}", emptied)
        _replay(tally, disk, before, saved, 3 * number, chance, folder)
    return tally


def power_loss_removal_without_fsync(number: int, chance: random.Random, folder: Path) -> Tally:
    """The proof that this bites: with the folder not fsynced after the rename, half of one shows up again."""
    before, disk, saved = _record(folder / "run", emptied=False)
    kept = [event for event in disk.events[saved:] if event[0] != "fsync"]
    disk.events[saved:] = kept
    found = Tally()
    _replay(found, disk, before, saved, 5 * number, chance, folder)
    return must_bite(found, "a removal without any fsync")


def _record(folder: Path, emptied: bool) -> tuple[Path, Disk, int]:
    """The run before, the calls of a save and of a removal after it, and how many of them are the save's.

    `emptied`: as on a drive whose trash counts, where files are truncated before they are deleted.
    """
    before, after = folder / "before", folder / "after"
    save(before, _OLD, _STAYS, size=SIZE)
    shutil.copytree(before, after)
    disk = Disk(str(after))
    save_here(after, _NEW, disk)
    saved = len(disk.events)
    store = Store(after)
    oldest = store.list()[-1]
    store_room.os = files.os = disk  # type: ignore[assignment]
    store_room.disk = SimpleNamespace(is_remote=lambda path: emptied)  # type: ignore[assignment]
    try:
        store.remove(oldest)
    finally:
        store_room.os = files.os = os
        store_room.disk = real_disk
    return before, disk, saved


def _replay(
    tally: Tally, disk: Disk, before: Path, saved: int, times: int, chance: random.Random, folder: Path
) -> None:
    every = len(disk.events)
    for trial in range(times):
        until = every if trial % 10 == 0 else chance.randrange(saved, every + 1)
        target = folder / "cut"
        disk.cut(before, until, chance, target)
        words = f"replay {trial}, cut after call {until}, {until - saved} of the removal"
        _judge(tally, target, until == every, words)
        if trial % 50 == 5:
            go_on(tally, target, 9, SIZE, words)
            _judge(tally, target, False, f"{words}, gone on")
        shutil.rmtree(target)


def _judge(tally: Tally, folder: Path, removed: bool, words: str) -> None:
    tally.tried += 1
    store = Store(folder)
    whole = []
    for entry in store.list():
        try:
            found = store.open(entry)
        except DamagedCheckpoint as error:
            tally.fail("unequal", f"{words}: {error.message}: {error.received}")
            continue
        whole.append(found.step)
        if not equal(found, SIZE):
            tally.fail("unequal", f"{words}: step {found.step} is not what was saved")
    for step in (_STAYS, _NEW):
        if step not in whole:
            tally.fail("lost", f"{words}: step {step} should stay")
    if removed and _OLD in whole:
        tally.fail("stuck", f"{words}: step {_OLD} is still there")
