"""Power loss of the machine that a mirror folder is on: what it lists is whole, and nothing promised there is lost."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from buoy.checkpoint.mirror import storage
from buoy.checkpoint.mirror.storage import FolderStorage, survey
from buoy.checkpoint.store import HALF, DamagedCheckpoint, Store
from buoy.machine import disk as machine_disk
from buoy.machine import files
from tests.checkpoint.ground import save
from tests.checkpoint.test_mirror_damage import work
from tests.kills.calls import SIZE
from tests.kills.kind import Tally, equal, must_bite
from tests.kills.power import Disk

_OLD, _STAYS, _NEW = 1, 2, 3


def power_loss_mirror(number: int, chance: random.Random, folder: Path) -> Tally:
    """As the mirror's process does it: a new one is copied, then the oldest removed; cut off after any call."""
    tally = Tally()
    for emptied in (False, True):
        before, disk, copied = _record(folder / f"emptied-{emptied}", emptied)
        _replay(tally, disk, before, copied, 3 * number, chance, folder)
    return tally


def power_loss_mirror_without_fsync(number: int, chance: random.Random, folder: Path) -> Tally:
    """The proof that this bites: without the fsyncs of folders, names are lost, or stand beside none of theirs."""
    before, disk, _ = _record(folder / "mirror", emptied=False)
    folders = {os.path.dirname(event[1]) for event in disk.events} | {disk.root}
    disk.events = [event for event in disk.events if event[0] != "fsync" or event[1] not in folders]
    found = Tally()
    _replay(found, disk, before, len(disk.events), 5 * number, chance, folder)
    return must_bite(found, "a mirror without any fsync of its folders")


def _record(folder: Path, emptied: bool) -> tuple[Path, Disk, int]:
    """The mirror before, the calls of a copy and of a removal there, and after how many the copy was called safe.

    `emptied`: as on a drive whose trash counts, where files are truncated before they are deleted.
    """
    run, before, after = folder / "run", folder / "before", folder / "after"
    save(run, _OLD, _STAYS, size=SIZE)
    work(run, before, keep=2)
    shutil.copytree(before, after)
    save(run, _NEW, size=SIZE)
    disk, copied = Disk(str(after)), [0]

    class Noted(FolderStorage):
        def __init__(self, *place: str) -> None:
            super().__init__(*place)
            self._drive = emptied

        def write(self, name: str, file: str, data: bytes) -> None:
            super().write(name, file, data)
            copied[0] = len(disk.events)

    storage.os = files.os = machine_disk.os = disk  # type: ignore[assignment]
    try:
        work(run, after, Noted, keep=2)
    finally:
        storage.os = files.os = machine_disk.os = os
    return before, disk, copied[0]


def _replay(
    tally: Tally, disk: Disk, before: Path, copied: int, times: int, chance: random.Random, folder: Path
) -> None:
    every = len(disk.events)
    for trial in range(times):
        until = every if trial % 10 == 0 else chance.randrange(every + 1)
        target = folder / "cut"
        disk.cut(before, until, chance, target)
        expected = {_STAYS, _NEW} if until >= copied else {_STAYS}
        _judge(tally, target, expected, until == every, f"replay {trial}, cut after call {until} of {every}")
        shutil.rmtree(target)


def _judge(tally: Tally, mirror: Path, expected: set[int], removed: bool, words: str) -> None:
    tally.tried += 1
    listed, unusable = survey(FolderStorage(str(mirror), "run"))
    for one in unusable:
        if one.fault != HALF:
            tally.fail("unequal", f"{words}: {one}")
    store, whole = Store(mirror / "run"), set()
    for entry in store.list():
        if os.path.basename(entry.folder) not in {copy.name for copy in listed}:
            continue
        try:
            found = store.open(entry)
        except DamagedCheckpoint as error:
            tally.fail("unequal", f"{words}: {error.message}: {error.received}")
            continue
        whole.add(found.step)
        if not equal(found, SIZE):
            tally.fail("unequal", f"{words}: step {found.step} is not what was saved")
    if not expected <= whole:
        tally.fail("lost", f"{words}: steps {sorted(whole)} instead of {sorted(expected)}")
    if removed and _OLD in whole:
        tally.fail("stuck", f"{words}: step {_OLD} is still there")
